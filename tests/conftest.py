"""Settings of all tests. Every test runs in float64 with strict promotion, on the CPU; markers and
`JAX_PLATFORMS` change these settings.
"""

import contextlib
import gc
import os
import pathlib
import signal

# Read when jax is imported; child processes inherit it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A shell's background process ignores SIGINT, and so would its children, which some tests stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.shared import cores, emitters  # isort: skip  (before jax)

# `XLA_FLAGS= make test` uses the compiler settings of users, as `make test-slow` does.
os.environ.setdefault("XLA_FLAGS", emitters.QUICK)

import hypothesis
import jax
import pytest

from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem._target.compile.backend import Local
from jaxmem._target.compile.protocol import Backend, Pricing
from jaxmem._target.deviceless.compiler import Compiler
from tests.shared import compilers, marks

hypothesis.settings.register_profile(
    "default", max_examples=40, deadline=None, derandomize=bool(os.environ.get("CI"))
)
hypothesis.settings.load_profile("default")


HERE = pathlib.Path(__file__).parent
# Tests, and variants of tests, that take about half a second or more, and that no law of LAWS.md
# needs. CI runs them after `make test`.
COSTLY = frozenset((HERE / "costly.txt").read_text("utf-8").splitlines())
MEASURED, RUN = Local.times, Local.run


def pytest_xdist_auto_num_workers(config) -> int:
    """Returns the number of processes of `-n auto`: one for each core, at most 8. On a GPU, only
    this process runs, since JAX takes all of the GPU's memory.
    """
    if os.environ["JAX_PLATFORMS"] != "cpu":
        return 0
    return min(len(cores.available()) or os.cpu_count() or 1, 8)


def pytest_itemcollected(item):
    """Adds the marks of a test's folder. Marks the tests of costly.txt as costly. Marks the
    variants of a test as slow that `@pytest.mark.quick` does not name.
    """
    for mark in marks.of_folder(item.path.relative_to(HERE)):
        item.add_marker(mark)
    name = item.nodeid.removeprefix("tests/")
    if name in COSTLY or name.partition("[")[0] in COSTLY:
        item.add_marker(pytest.mark.costly)
    named = item.get_closest_marker("quick")
    if named is not None and item.callspec.id not in named.args:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Raises an error if `@pytest.mark.quick` or costly.txt names an id that no variant has."""
    if any("::" in argument for argument in config.args):
        return
    files = {item.nodeid.partition("::")[0] for item in items}
    quick = {
        f"{item.nodeid.partition('[')[0]}[{name}]"
        for item in items
        for named in [item.get_closest_marker("quick")]
        if named is not None
        for name in named.args
    }
    costly = {f"tests/{name}" for name in COSTLY if "[" in name}
    costly = {name for name in costly if name.partition("::")[0] in files}
    missing = (quick | costly) - {item.nodeid for item in items}
    if missing:
        raise pytest.UsageError(f"`quick` and costly.txt: no variant has the id {sorted(missing)}")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Freezes imported objects, which live to the end, and collects garbage less often, since
    tracing makes many short-lived objects. The suite then takes 0.94 of the seconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def set_numerics(x64: bool, promotion: str):
    jax.config.update("jax_enable_x64", x64)
    jax.config.update("jax_numpy_dtype_promotion", promotion)


set_numerics(x64=True, promotion="strict")  # for computations of a test module at import


@pytest.fixture(autouse=True)
def numerics(request):
    """Applies the markers `jax_defaults` and `standard_promotion`."""
    defaults = request.node.get_closest_marker("jax_defaults")
    standard = defaults or request.node.get_closest_marker("standard_promotion")
    set_numerics(x64=not defaults, promotion="standard" if standard else "strict")
    yield
    set_numerics(x64=True, promotion="strict")


@pytest.fixture(autouse=True)
def checkpoint(request):
    """Applies the marker `todays_checkpoint`."""
    reads = request.node.get_closest_marker("todays_checkpoint")
    with todays_checkpoint() if reads else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_compiles():
    """Compiles without LLVM's costly passes, in half of the seconds. HLO and buffers do not change;
    kernels run slower, and may round the last bit differently. Programs have no Python locations.
    """
    jax.config.update("jax_traceback_in_locations_limit", 0)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def optimized(quick_compiles):
    """Compiles programs with all passes, as for users, for a test that compares bits or time."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session", autouse=True)
def computed_times():
    """Prices plans for the device at hand by its rates, so that times are equal in every run.
    Compiling and running pieces to time them would be half of the seconds of such a plan.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Local, "times", Pricing.times)
        patch.setattr(Local, "run", Backend.run)
        yield


@pytest.fixture
def measured_times(computed_times):
    """Measures times, as for users, for a test of measured times or of a whole plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Local, "times", MEASURED)
        patch.setattr(Local, "run", RUN)
        yield


@pytest.fixture(scope="session", autouse=True)
def lent_processes(tmp_path_factory):
    """Keeps processes that compile for absent GPUs for the next tests, with assembled kernels."""
    with pytest.MonkeyPatch.context() as patch:
        pool = compilers.share(patch, tmp_path_factory.mktemp("kernels"))
        yield
        pool.end_all_but(0)


@pytest.fixture
def own_processes(lent_processes):
    """Lets each compiler start and end its own processes, for a test of the processes."""
    with pytest.MonkeyPatch.context() as patch:
        compilers.start_alone(patch)
        yield


@pytest.fixture(scope="module")
def h200(lent_processes):
    """A compiler for an absent H200, one for each file of tests that requests it."""
    with Compiler("h200", workers=1) as compiler:
        yield compiler


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(tmp_path_factory):
    """Gives this process an empty cache folder: no other process's times or compiles are read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """Gives this module an empty database, without other modules' plans."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield

"""Every test runs in float64 with strict promotion, on the CPU, unless its markers or
`JAX_PLATFORMS` say otherwise.
"""

import gc
import importlib.metadata
import os
import signal

# Read when jax is imported; child processes inherit it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA:CPU's other way to make code of fusions compiles this suite in 0.6 of the seconds, and in 0.5
# where it does not divide a program's code for threads: a worker has one core. jaxlib 0.11 lacks
# the first flag, gains little by the second, and ends the process at flags that it does not know.
# `XLA_FLAGS= make test` runs what users run, as `make test-slow` does.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
    )

# A suite that a shell runs in the background ignores SIGINT, and so would the runs that tests stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.shared import cores  # isort: skip  (before jax)

import hypothesis
import jax
import pytest

from jaxmem._target.compile.backend import Local
from jaxmem._target.compile.protocol import Backend, Pricing
from jaxmem._target.deviceless.compiler import Compiler
from tests.shared import compilers

hypothesis.settings.register_profile(
    "default", max_examples=40, deadline=None, derandomize=bool(os.environ.get("CI"))
)
hypothesis.settings.load_profile("default")


MEASURED, RUN = Local.times, Local.run


def pytest_xdist_auto_num_workers(config) -> int:
    """What `-n auto` means: a process a core, of at most 8; this process alone on a GPU, whose
    memory JAX takes whole.
    """
    if os.environ["JAX_PLATFORMS"] != "cpu":
        return 0
    return min(len(cores.available()) or os.cpu_count() or 1, 8)


def pytest_itemcollected(item):
    """Marks the variants of a test as slow that `@pytest.mark.quick` does not name."""
    named = item.get_closest_marker("quick")
    if named is not None and item.callspec.id not in named.args:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Refuses an id in `@pytest.mark.quick` that no variant has."""
    if any("::" in argument for argument in config.args):
        return
    missing = {
        f"{item.nodeid.partition('[')[0]}[{name}]"
        for item in items
        for named in [item.get_closest_marker("quick")]
        if named is not None
        for name in named.args
    } - {item.nodeid for item in items}
    if missing:
        raise pytest.UsageError(f"`quick` names variants that are none: {sorted(missing)}")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """What was imported stays to the end, and tracing makes many objects that live briefly: Python
    looks for garbage among fewer of them and less often, in 0.94 of the seconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def set_numerics(x64: bool, promotion: str):
    jax.config.update("jax_enable_x64", x64)
    jax.config.update("jax_numpy_dtype_promotion", promotion)


set_numerics(x64=True, promotion="strict")  # for what a test module computes when it is imported


@pytest.fixture(autouse=True)
def numerics(request):
    """What the markers `jax_defaults` and `standard_promotion` stand for."""
    defaults = request.node.get_closest_marker("jax_defaults")
    standard = defaults or request.node.get_closest_marker("standard_promotion")
    set_numerics(x64=not defaults, promotion="standard" if standard else "strict")
    yield
    set_numerics(x64=True, promotion="strict")


@pytest.fixture(scope="session", autouse=True)
def quick_compiles():
    """LLVM's costly passes are left out, in half of the seconds: HLO and buffers are the same, and
    kernels run slower and may round the last bit otherwise. Programs name no lines of Python.
    """
    jax.config.update("jax_traceback_in_locations_limit", 0)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def optimized(quick_compiles):
    """Programs as a user's are compiled, for a test that compares bits or time."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session", autouse=True)
def computed_times():
    """Plans for the device at hand take their times from its rates: nothing is compiled and run to
    be timed, which is half of the seconds of such a plan, and times are the same in every run.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Local, "times", Pricing.times)
        patch.setattr(Local, "run", Backend.run)
        yield


@pytest.fixture
def measured_times(computed_times):
    """For a test of measured times, or of a whole plan as a user has it: they are measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Local, "times", MEASURED)
        patch.setattr(Local, "run", RUN)
        yield


@pytest.fixture(scope="session", autouse=True)
def lent_processes(tmp_path_factory):
    """Processes that compile for absent GPUs go on with the next test, and know its kernels."""
    with pytest.MonkeyPatch.context() as patch:
        pool = compilers.share(patch, tmp_path_factory.mktemp("kernels"))
        yield
        pool.end_all_but(0)


@pytest.fixture
def own_processes(lent_processes):
    """For a test of the processes themselves: each compiler starts its own, and ends them."""
    with pytest.MonkeyPatch.context() as patch:
        compilers.start_alone(patch)
        yield


@pytest.fixture(scope="module")
def h200(lent_processes):
    """A compiler for an H200 that is not there, one for each file of tests that asks for it."""
    with Compiler("h200", workers=1) as compiler:
        yield compiler


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(tmp_path_factory):
    """Nothing that earlier runs, the user or another worker measured or compiled is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def own_database(tmp_path_factory):
    """Plans know nothing of what other modules planned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield

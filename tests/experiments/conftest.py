"""Programs here are compiled often and run briefly: XLA's costly passes are left out, the same
program is compiled once, and random bits come from a short program.
"""

import os
import sys

import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.shared import emitters
from tests.shared.options import options

CHEAP = {
    "jax_default_prng_impl": "rbg",  # threefry's rounds take a third of a small step's compile
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_traceback_in_locations_limit": 0,  # a program is the same whoever traced it
}


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """Where compiled programs lie, until all tests have run."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """The setting of a text that a small model learns."""
    path = tmp_path_factory.mktemp("data") / "text.py"
    lines = (f"def function_{i}(x):\n    return x + {i * i}\n\n" for i in range(400))
    path.write_text("".join(lines))
    return f"data.path={path}"


@pytest.fixture(scope="module", autouse=True)
def quickly(quick_compiles, programs):
    with options(**CHEAP, jax_compilation_cache_dir=str(programs)):
        compilation_cache.reset_cache()  # which looks at its folder once
        yield
    compilation_cache.reset_cache()


@pytest.fixture
def child_paths(tmp_path, monkeypatch):
    """Child processes find the packages, installed or not, and the part that is written here."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {emitters.OLDER}")
    monkeypatch.syspath_prepend(str(tmp_path))

"""Every test runs in float64 with strict promotion, on the CPU, unless its markers or
`JAX_PLATFORMS` say otherwise.
"""

import os

os.environ.setdefault(
    "JAX_PLATFORMS", "cpu"
)  # read when jax is imported; child processes inherit it

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=bool(os.environ.get("CI"))
)
hypothesis.settings.load_profile("default")


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


@pytest.fixture(scope="module")
def quick_compiles():
    """Programs that are compiled often and run briefly go without XLA's costly passes."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def own_database(tmp_path_factory):
    """Plans know nothing of what other modules planned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield

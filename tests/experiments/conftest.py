"""Programs here are compiled often and run briefly: XLA's costly passes are left out, unless a test asks for them."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_compiles():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def optimized(quick_compiles):
    """Programs as a user's are compiled."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)

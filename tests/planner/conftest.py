"""What tests of plans share."""

import jax
import pytest


@pytest.fixture(scope="module")
def own_database(own_cache):
    """A module's plans know nothing of what others compiled. They may be made by other fixtures of
    the module, which come before a test's own settings: so JAX is set here too, as a user has it.
    """
    jax.config.update("jax_enable_x64", False)
    jax.config.update("jax_numpy_dtype_promotion", "standard")

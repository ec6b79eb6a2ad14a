"""The plans that tests of rectifiers begin with."""

import jax
import pytest

import jaxmem
from tests.shared.rectified import ASKED, build, data, parameters


@pytest.fixture(scope="module")
def whole():
    """The step as it is."""
    with jax.numpy_dtype_promotion("standard"):
        return jaxmem.plan(build, parameters(()), data(1))


@pytest.fixture(scope="module")
def plan(whole):
    with jax.numpy_dtype_promotion("standard"):
        budget = int(0.8 * whole.baseline_bytes)
        return jaxmem.plan(build, parameters(()), data(1), budget=budget, **ASKED)

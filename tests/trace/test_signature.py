"""How a jitted function is called: static arguments, and keys of arguments."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem._trace.signature import Signature

pytestmark = pytest.mark.core
BATCH = np.ones((4, 3), np.int32)


def step(model, batch, rate):
    return model, batch.sum() * rate


def test_equal_static_arguments_of_other_types_have_other_programs():
    function = lambda x, n, *, power=1: x
    by_number = Signature(function, {"static_argnums": 1})
    keys = {by_number.key((BATCH, n), {}) for n in (1, True, 1.0)}
    assert len(keys) == 3
    by_name = Signature(function, {"static_argnames": "power"})
    assert by_name.key((BATCH,), {"power": 1}) != by_name.key((BATCH,), {"power": True})


def test_of_numbers_and_names_given_together_neither_finds_the_others():
    """As under `jax.jit`: a parameter that is static by name is traced by its position."""
    options = {"static_argnums": 1, "static_argnames": "rate"}
    function = lambda x, n, rate: x * n * rate
    args, _ = Signature(function, options).dynamic((3.0, 2, 0.5), {})
    assert args == (3.0, 0.5)
    jax.jit(function, **options).lower(3.0, 2, jnp.float32(0.5))
    assert Signature(function, options).dynamic((3.0, 2), {"rate": 0.5}) == ((3.0,), {})


def test_a_static_number_of_an_equinox_module_is_a_part_of_the_program():
    net = eqx.nn.Dropout(0.5)
    key = lambda net, rate: Signature(step, {}).key((net, BATCH, rate), {})
    assert key(net, 0.1) == key(eqx.nn.Dropout(0.5), 0.2), "other numbers are traced"
    assert key(net, 0.1) != key(eqx.nn.inference_mode(net), 0.1)
    assert key(net, 0.1) != key(eqx.nn.Dropout(0.6), 0.1)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_numpy_arrays_and_shapes_run_the_program_of_jaxs_arrays(dtype):
    array = np.ones((3, 2), dtype)
    kinds = array, jnp.asarray(array), jax.ShapeDtypeStruct(array.shape, array.dtype)
    assert len({Signature(step, {}).key((one,), {}) for one in kinds}) == 1

"""First states of losses that are made layer by layer, of arrays in the host's memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.errors import OptimizerError
from tests.released import test_frozen
from tests.released.test_loss import trained
from tests.shared.compare import close

pytestmark = [pytest.mark.core, pytest.mark.standard_promotion]

CREATED = {
    "AdamW": test_frozen.adam,
    "8 bits": lambda: jaxmem.quantized(test_frozen.adam()),
    "AdamA": lambda: jaxmem.adama(0.01, eps=0.01, accumulation_steps=2, second_moment="row"),
    "a copy of the parameters": lambda: optax.contrib.schedule_free_adamw(0.01, eps=0.01),
}
WHERE = {
    "on the device": {"persist": test_frozen.LAYERS},
    "copies": {"copies": 1, "buffers": 1, "persist": 1},
}
WHERE["streamed"] = {"persist": 0, "outer_moments": "pinned_host"}


@pytest.mark.quick("streamed-8 bits-LoRA", "copies-AdamA-LoRA", "on the device-AdamW-all trained")
@pytest.mark.parametrize("model", ["LoRA", "all trained"])
@pytest.mark.parametrize("tx", CREATED)
@pytest.mark.parametrize("where", WHERE)
def test_a_state_of_numpy_arrays_is_made_in_its_places(model, tx, where):
    loss, params, trainable = test_frozen.MODELS["LoRA"]()
    if model == "all trained":
        params["layers"].pop("coded")
        loss, trainable = without_codes, None
    step = jaxmem.released_step(CREATED[tx](), loss, trainable=trainable)
    bound, where = step.of(params, test_frozen.batch()), WHERE[where]
    got = step.create(jax.tree.map(np.asarray, params), test_frozen.batch(), **where)
    want = bound.split(step.init(jax.tree.map(jnp.copy, params), test_frozen.batch()), **where)
    equal(got, want)
    after = (
        trained(step, got, (test_frozen.batch(),), 2)[0],
        trained(step, want, (test_frozen.batch(),), 2)[0],
    )
    close(*map(test_frozen.numbers, map(bound.joined, after)), 1e-12)


def equal(got, want):
    """Asserts that two states have equal values, dtypes and memories."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert (a.dtype, a.sharding.memory_kind) == (b.dtype, b.sharding.memory_kind)
        assert np.array_equal(a, b)


def without_codes(params, x):
    layer = lambda x, p: (x + jnp.tanh(x @ (p["up"] + p["a"] @ p["b"])) @ p["down"], None)
    x, _ = jax.lax.scan(layer, x @ params["embedding"] * params["gain"], params["layers"])
    return ((x @ params["head"]) ** 2).mean()


@pytest.mark.quick("streamed-8 bits", "on the device-a copy of the parameters")
@pytest.mark.parametrize("tx", CREATED)
@pytest.mark.parametrize("where", ["on the device", "streamed"])
def test_a_state_of_layers_in_a_python_loop_is_made_in_its_places(tx, where):
    loss, params, trainable = test_frozen.MODELS["a Python loop"]()
    step = jaxmem.released_step(CREATED[tx](), loss, trainable=trainable)
    where, on_host = WHERE[where], jax.tree.map(np.asarray, params)
    got = step.create(on_host, test_frozen.batch(), **where)
    first = step.init(jax.tree.map(jnp.copy, params), test_frozen.batch())
    equal(got, step.of(params, test_frozen.batch()).split(first, **where))


def test_layers_in_a_python_loop_have_no_copies():
    loss, params, trainable = test_frozen.MODELS["a Python loop"]()
    step = jaxmem.released_step(test_frozen.adam(), loss, trainable=trainable)
    with pytest.raises(OptimizerError, match="create: `copies` is 1 .* Python loop"):
        step.create(params, test_frozen.batch(), copies=1)
    with pytest.raises(OptimizerError, match="`mesh` is None"):
        step.create(params, test_frozen.batch(), divided="layers")

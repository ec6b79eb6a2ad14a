"""The adapters of the fine-tuning benchmarks: their layer computes, and only they are trained."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from benchmarks import fine_tuning
from experiments.models import registry

pytestmark = pytest.mark.jax_defaults
SMALL = "model.width=32", "model.hidden=64", "model.layers=2", "model.heads=4", "model.kv_heads=4"


@pytest.mark.parametrize("base", ["bfloat16", "int8"])
def test_a_step_trains_adapters_alone(base):
    config = fine_tuning.llama_of(4, 8, *SMALL, "model.vocab=256", "train.loss_chunk=8")
    shapes, loss = fine_tuning.with_adapters(config, base)

    def fill(i, a):
        codes = jax.random.randint(jax.random.key(i), a.shape, -3, 4)
        is_float = jnp.issubdtype(a.dtype, jnp.floating)
        return (codes / 8 if is_float else codes).astype(a.dtype)

    leaves, structure = jax.tree.flatten(shapes)
    params = structure.unflatten([fill(i, a) for i, a in enumerate(leaves)])
    step = jaxmem.released_step(optax.adamw(1e-3), loss, trainable=fine_tuning.trainable)
    tokens = jax.random.randint(
        jax.random.key(1), registry.batch_shape(config).shape, 0, 256, jnp.int32
    )
    (new, _), metrics = jax.jit(step)(step.init(params, tokens), tokens)
    assert np.isfinite(metrics["loss"])
    mask = jax.tree.leaves(fine_tuning.trainable(params))
    assert 0 < sum(mask) < len(mask)
    for flag, a, b in zip(mask, leaves_of(params), leaves_of(new), strict=True):
        assert np.array_equal(a, b) != flag


def leaves_of(tree):
    return [np.asarray(a, np.float32) for a in jax.tree.leaves(tree)]

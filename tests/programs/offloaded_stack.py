"""Run by test_stack_deviceless.py in a compiler's environment: the HLO of a stack that offloads,
for an H200.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmem
from jaxmem._core.assignment import Assignment
from tests.shared import deviceless, models

LAYERS, BATCH, SEQUENCE, WIDTH = 6, 16, 128, 64


def main():
    sharding = NamedSharding(Mesh(deviceless.devices(), ("data",)), PartitionSpec())
    spec = lambda tree: jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree
    )
    shapes = jax.eval_shape(
        lambda: (models.parameters(LAYERS, WIDTH), models.batch(BATCH, SEQUENCE, WIDTH))
    )
    plan = Assignment({"block": models.actions("offload")})

    def loss(params, x):
        numbers = jnp.arange(LAYERS, dtype=jnp.float32)
        y = jaxmem.stack(lambda p, x: models.block(x, *p), (params, numbers), x, plan=plan)
        return (y * y).mean()

    return jax.jit(jax.grad(loss, (0, 1))).trace(*spec(shapes)).lower().compile().as_text()

"""Steps of the record that are planned by more than actions of equal layers: states that are placed
and divided, groups of layers, and steps whose time is measured.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from tests.shared import models, tiny_lm


def released(axis: str | None = None) -> tuple:
    """A released step of four layers, its state, and a batch; `axis` divides both."""

    def build(plan):
        tx = jaxmem.adama(1e-3, accumulation_steps=2, axis_name=axis)
        return tiny_lm.released(tx, plan=plan, dtype=jnp.bfloat16)

    make = functools.partial(tiny_lm.parameters, np.float32, layers=4, width=256, vocab=512)
    state = jax.eval_shape(lambda: build(None).init(make()))
    return build, state, jax.ShapeDtypeStruct((16, 65), jnp.int32)


def layer(w, x):
    up = jaxmem.tag(x @ w["up"], "up", kind="linear")
    return x + jaxmem.tag(jax.nn.gelu(up), "gelu", kind="gelu") @ w["down"]


def stacked() -> tuple:
    """A step of six layers in `jaxmem.stack`, and its arguments."""

    def build(plan):
        loss = lambda w, x: (jaxmem.stack(layer, w, x, plan=plan) ** 2).mean()
        return lambda w, x: jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))

    shape = lambda *axes: jax.ShapeDtypeStruct(axes, jnp.bfloat16)
    w = {"up": shape(6, 256, 1024), "down": shape(6, 1024, 256)}
    return build, w, shape(2048, 256)


def measured() -> tuple:
    """A step of four narrow layers, which the clock of `seconds_by_bytes` measures."""
    make = lambda: (models.parameters(4, 64, jnp.float32), models.batch(8, 128, 64, jnp.float32))
    narrow = functools.partial(models.scanned, block=models.narrow)
    return models.build_with(narrow), *jax.eval_shape(make)


def seconds_by_bytes(self, steps, traced, args, seconds) -> list[list[float]]:
    """Takes the place of `Local.run`: the seconds of a step are its bytes, in three rounds."""
    return [[1e-9 * step.total_bytes * f for f in (1.0, 1.1, 1.3)] for step in steps]

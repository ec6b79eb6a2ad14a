"""The row ratio of arrays that are divided over a mesh: whole gradients stay where they are, and
values are those of one device. It needs 8 devices.
"""

import functools
import math
import re

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem

CASES = [
    ((64, 512), P("x", None)),
    ((64, 512), P(None, "x")),
    ((96, 256), P("x", "y")),
    ((264, 64), P(("x", "y"), None)),  # 33 times 8 rows
    ((4, 64, 64), P(None, "x", None)),
    ((4, 64, 64), P(None, None, "x")),
    ((4, 8, 64), P("x", None, None)),
    ((3, 3, 64, 256), P(None, None, "x", None)),
    ((4, 64, 8, 64), P(None, None, None, "x")),
    ((512,), P("x")),
]
tx = jaxmem.adamaw_a(1e-2, accumulation_steps=2, second_moment="row")


def run(update, params, grads):
    state = jax.jit(tx.init)(params)
    for g in grads:
        updates, state = update(g, state, params)
    return updates, state.square


def given(shape):
    rng = np.random.default_rng(0)
    params, *grads = (rng.standard_normal(shape).astype(np.float32) for _ in range(5))
    return params, grads


@functools.cache
def of_one_device(shape):
    return run(jax.jit(tx.update), *given(shape))


def check(shape, spec, kind) -> None:
    (params, grads), want = given(shape), of_one_device(shape)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        place = lambda a: jax.device_put(a, NamedSharding(mesh, spec))
        params, grads = place(params), list(map(place, grads))
        compiled = jax.jit(tx.update).lower(grads[0], jax.jit(tx.init)(params), params).compile()
        moves = r"= \w+\[([0-9,]*)\]\S* (?:all-gather|all-to-all|collective-permute)(?:-start)?\("
        moved = [math.prod(map(int, s.split(","))) for s in re.findall(moves, compiled.as_text())]
        assert all(size <= np.size(want[1]) for size in moved), (shape, spec, kind, moved)
        got = run(jax.jit(tx.update), params, grads)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=1e-6)


def main() -> dict:
    for kind in (AxisType.Auto, AxisType.Explicit):
        for shape, spec in CASES:
            check(shape, spec, kind)
    return {"checked": 2 * len(CASES)}

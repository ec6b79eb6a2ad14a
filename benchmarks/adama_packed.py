"""Why the sum of gradients is not kept in the second moment's low bits: how long a step may be.

    python -m benchmarks.adama_packed

A million parameters whose N microbatches have random gradients. Adam's first step is the rate, for
each of them. Where the sum is rounded as it is gathered (`benchmarks/shared/packed.py`), a step is
the rate times the mean gradient over the rounded one, and a mean that nearly cancels is rounded by
more than it is. AdamA's steps, with the squares and with the row ratio, are at most √N of the rate.
Cells are in units of the rate: the longest step, and the share of steps more than twice the rate.
"""

from typing import Any

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks.shared import packed
from benchmarks.shared.results import Report

COUNTS, ROWS, COLUMNS, B1, B2 = (2, 4, 8), 1024, 1024, 0.9, 0.95


def first_step(way: Any, gradients: list) -> jax.Array:
    """Every parameter's first step, over the rate."""
    params = jnp.zeros((ROWS, COLUMNS))
    if way == "packed":
        m, v, _ = packed.minibatch(packed.init(params), gradients, B1, B2, jax.random.key(1))
        return jnp.abs(m) / (v**0.5 + 1e-8)
    tx = jaxmem.scale_by_adama(B1, B2, accumulation_steps=len(gradients), second_moment=way)
    state, update = tx.init(params), None
    for g in gradients:
        update, state = tx.update(g, state, params)
    return jnp.abs(jnp.asarray(update))


def main() -> None:
    report = Report("adama_packed")
    for n in COUNTS:
        draw = lambda i: jax.random.normal(jax.random.key(i), (ROWS, COLUMNS))
        gradients = [draw(i) for i in range(n)]
        for way in ("squares", "row", "packed"):
            steps = first_step(way, gradients)
            found = {"longest": float(steps.max()), "over twice": float((steps > 2).mean())}
            report.add(f"{way}, {n}", found)


if __name__ == "__main__":
    main()

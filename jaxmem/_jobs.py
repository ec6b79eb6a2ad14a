"""The pieces of work whose times a profile needs, by key."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxmem._costs import Job

LOOP = 4  # layers


class Jobs:
    """Jobs in the order added. `local`: they will run here, so that keeping a tensor can be timed as a loop does it."""

    def __init__(self, local: bool):
        self.local = local
        self.keys: list[tuple] = []
        self.jobs: list[Job] = []
        self._kept: list[tuple] = []

    def add(self, key: tuple, job: Job) -> None:
        self.keys.append(key)
        self.jobs.append(job)

    def keep(self, size: int) -> tuple:
        """The key of what keeping `size` bytes costs, beyond what computes them.

        Here: a loop over layers that keeps them for its backward, less one that does not, since what fresh memory and
        the loop's buffers cost is no copy's price. Elsewhere, and where XLA prices it: one pass that reads and writes.
        """
        key, aval = ("keep", size), jax.ShapeDtypeStruct((-(-size // 4),), jnp.float32)
        if key in self._kept or key in self.keys:
            return key
        if not self.local:
            self.add(key, Job(lambda x: -x, (aval,)))
            return key
        self._kept.append(key)
        for kept in (True, False):
            self.add((*key, kept), Job(functools.partial(_loop, kept), (aval,)))
        return key

    def prices(self, seconds: Sequence[float]) -> dict[tuple, float]:
        """Seconds by key, from those of the jobs in order."""
        price = dict(zip(self.keys, seconds))
        for key in self._kept:
            price[key] = max(0.0, price[*key, True] - price[*key, False]) / LOOP
        return price


def _loop(kept: bool, x):
    """A forward and a backward loop that hand `x` from layer to layer, and keep it for the backward, or do not."""

    def forward(c, _):
        y = c * 0.5 + 1.0
        return y, y if kept else None

    def backward(c, y):
        return c * 0.9 + (y if kept else 0.1), None

    last, stack = jax.lax.scan(forward, x, None, length=LOOP)
    return jax.lax.scan(backward, last, stack, length=LOOP, reverse=True)[0]

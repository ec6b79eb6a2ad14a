"""The pieces of work whose times a profile needs, by key.

The blocks of a profile are built before any time is known: each field of seconds holds an
`Untimed`, the pieces of work to be timed. All jobs are timed together, so that equal jobs are timed
once. Then `with_prices` in `price.py` replaces each `Untimed` by its seconds.

A tensor that a loop keeps is priced as two copies: into the loop's stack and out of the stack
(`Jobs.keep`, unless the device at hand can time the loop). By XLA's estimates of whole steps,
recomputing a softmax of a GPT therefore saves time. `benchmarks/estimates.py` compares the cost
model with such estimates, one tag at a time.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from jaxmem._target.devices.tiles import tiled_bytes
from jaxmem._trace.jaxpr import nbytes
from jaxmem._trace.job import Job

# The size of the loop that measures the cost of keeping: more than any cache, or allocator, holds.
LAYERS, LAYER_BYTES = 32, 2**22


class Untimed(float):
    """The pieces of work of a field of seconds. As a number it is 0.0, since no piece is timed yet.

    pieces: for each piece, the key of its job, and the factor of the job's seconds.
    """

    pieces: tuple[tuple[tuple, float], ...]

    def __new__(cls, pieces: Iterable[tuple[tuple, float]] = ()):
        made = super().__new__(cls)
        made.pieces = tuple(pieces)
        return made

    def timed(self, seconds: Callable[[tuple], float]) -> float:
        """The seconds of all pieces; `seconds` returns the seconds of the job under a key."""
        return sum((factor * seconds(key) for key, factor in self.pieces), 0.0)


class Jobs:
    """Collects jobs in the order in which they are added, by key.

    local: whether the jobs run on the device at hand, so that a loop can time the keeping of
      tensors.
    tiled: whether an array takes the bytes of whole tiles, as on a TPU.
    """

    def __init__(self, local: bool, tiled: bool = False):
        self.local, self.tiled = local, tiled
        self.by_key: dict[tuple, Job] = {}
        self._kept: set[tuple] = set()

    def stored(self, aval, layers: int = 1) -> int:
        """Bytes of an array, as one layer of a stacked array of `layers` layers."""
        if not self.tiled or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            return nbytes(aval)
        size = tiled_bytes((layers, *aval.shape), aval.dtype.itemsize)
        shared = 2 if aval.dtype.name in ("int4", "uint4") else 1  # numbers in a byte
        return -(-size // (layers * shared))

    def keep(self, size: int, stacked: bool) -> tuple[tuple, ...]:
        """Adds the jobs that price the keeping of `size` bytes until the backward, and returns
        their keys. The price does not include the time to compute these bytes.

        On the device at hand, the jobs are two loops over layers: one loop saves a tensor in each
        layer for its backward, and the other loop saves none. The difference of their seconds is
        divided among the saved bytes. The saved tensors of a step are one large piece of fresh
        memory. Each page of fresh memory costs more than the writing of its bytes, however small
        the single tensor is.

        On other targets, the jobs are passes that read and write `size` bytes. If a loop over
        layers stacks the saved tensors, there are two passes, since XLA copies a tensor into the
        stack and out of it again. Otherwise there is one pass: the writing and the reading. The
        result `time_choices` compares both with XLA's estimates of whole steps.
        """
        key = ("pass", size)
        if self.local:
            if not self._kept:  # one pair of loops gives the price of every size
                aval = jax.ShapeDtypeStruct((LAYER_BYTES // 4,), jnp.float32)
                for kept in (True, False):
                    self.by_key["loop", kept] = Job(functools.partial(_loop, kept), (aval,))
            self._kept.add(key)
            return (key,)
        if key not in self.by_key:
            aval = jax.ShapeDtypeStruct((-(-size // 4),), jnp.float32)  # bytes are rounded up
            self.by_key[key] = Job(lambda x: -x, (aval,))
        return (key, key) if stacked else (key,)

    def prices(self, seconds: Sequence[float]) -> dict[tuple, float]:
        """Returns seconds by key.

        seconds: the seconds of each job, in order.
        """
        price = dict(zip(self.by_key, seconds))
        if self._kept:
            of_byte = max(0.0, price["loop", True] - price["loop", False]) / (LAYERS * LAYER_BYTES)
            price |= {key: of_byte * key[1] for key in self._kept}
        return price


def _loop(kept: bool, x):
    """A forward and a backward loop that pass `x` from layer to layer. With `kept`, the forward
    loop saves `x` of each layer for the backward loop.
    """

    def forward(c, _):
        y = c * 0.5 + 1.0
        return y, y if kept else None

    def backward(c, y):
        return c * 0.9 + (y if kept else 0.1), None

    last, stack = jax.lax.scan(forward, x, None, length=LAYERS)
    return jax.lax.scan(backward, last, stack, length=LAYERS, reverse=True)[0]

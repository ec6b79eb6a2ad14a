"""Which implementation of the tag is in use, and what both implementations do with a policy's
answer.

JAX 0.12 has two implementations of `jax.checkpoint`. The option `jax_remat3` chooses between them,
and with them between `primitive.py` (off) and `hijax.py` (on).
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import Offloadable

from jaxmem._model.states.places import HOST


def called(function: Callable, name: str) -> Callable:
    """Returns `function` under `jax.jit` with the name `name`. `jaxmem.explain` finds the buffers
    of codes in the compiled program by this name.
    """
    function.__name__ = name
    return jax.jit(function)


def divided_as(aval, x):
    """Reshards `x` to the sharding of the type `aval`, on a mesh with explicit axes."""
    typed = getattr(aval, "sharding", None)
    if typed is None or typed.mesh.empty or jax.typeof(x).sharding == typed:
        return x
    return jax.sharding.reshard(x, typed)


# `jax_remat3` is an option since JAX 0.10, and reaches `HiPrim.remat` since JAX 0.12.
_HAS_RULES = jax.__version_info__ >= (0, 12)


def is_remat3() -> bool:
    """Whether JAX runs its next checkpoint."""
    return bool(getattr(jax.config, "jax_remat3", False))


def is_hijax() -> bool:
    """Whether `hijax.py` implements tags. In older versions of JAX the option is refused."""
    return _HAS_RULES and is_remat3()


class Offloaded:
    """JAX's `Offloadable` as `encode` and `decode`: the two copies that `jax.checkpoint` makes
    itself for a primitive without a rule.
    """

    def __init__(self, word: Offloadable):
        self._out, self._back = map(_space, (word.dst, word.src))

    def encode(self, x):
        return (jax.device_put(x, self._out, may_alias=False),)

    def decode(self, codes, shape, dtype):
        return jax.device_put(codes[0], self._back, may_alias=False)


def _space(kind: str):
    """JAX's name for the memory of this kind."""
    return jax.memory.Space.Host if kind == HOST else jax.memory.Space.Device

"""Which implementation of the tag is in use, and what both implementations do with a policy's
answer.

JAX 0.12 has two implementations of `jax.checkpoint`. The option `jax_remat3` chooses between them,
and with them between `primitive.py` (off) and `hijax.py` (on).

Steps and stacks that run are traced under the user's options. Traces that jaxmem reads are made
within `todays_checkpoint`: of a step whose blocks are searched, of a step whose outliers are
counted, and of a function whose layers `jaxmem.auto` finds and makes blocks. So each reader of
programs knows one implementation, and finds the same blocks, prices and estimates with the option
as without it. The alternative is to read programs of the next checkpoint. In such a program no
equation is a block: the forward has the block's operations among the others, the backward has an
equation that recomputes the residuals, and the operations that read cotangents are outside this
equation. The readers of blocks, of layers and of live memory would need a second version each.

Limits: JAX exports no context for these options. So the context changes them for all threads, and
no other thread may trace a checkpoint at that time. A `jax.custom_vjp` function that was made while
`jax_custom_vjp3` was on has the next form in these traces too: `auto` has no tag for the tensors
that it saves. When JAX removes today's checkpoint, the second version is needed.
"""

import contextlib
from collections.abc import Callable, Iterator

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
# Remove with JAX 0.11: the constant, so that `is_hijax` is `is_remat3`.
_HAS_RULES = jax.__version_info__ >= (0, 12)


def is_remat3() -> bool:
    """Whether JAX runs its next checkpoint."""
    return bool(getattr(jax.config, "jax_remat3", False))


def is_hijax() -> bool:
    """Whether `hijax.py` implements tags. In older versions of JAX the option is refused."""
    return _HAS_RULES and is_remat3()


def next_options() -> tuple[str, ...]:
    """Returns the options that are on, of the two by which JAX replaces `jax.checkpoint` and
    `jax.custom_vjp`; none if `jax.checkpoint` is today's.
    """
    names = ("jax_remat3", "jax_custom_vjp3") if is_remat3() else ()
    return tuple(name for name in names if getattr(jax.config, name, False))


@contextlib.contextmanager
def todays_checkpoint() -> Iterator[None]:
    """A context in which JAX traces with today's checkpoint."""
    # Remove with today's checkpoint: the readers of programs then need their second version.
    on = next_options()
    for name in on:
        jax.config.update(name, False)
    try:
        yield
    finally:
        for name in on:
            jax.config.update(name, True)


class Offloaded:
    """JAX's `Offloadable` as `encode` and `decode`: the two copies that `jax.checkpoint` makes
    itself for a primitive without a rule.
    """

    def __init__(self, word: Offloadable):
        space = lambda kind: jax.memory.Space.Host if kind == HOST else jax.memory.Space.Device
        self._out, self._back = space(word.dst), space(word.src)

    def encode(self, x):
        return (jax.device_put(x, self._out, may_alias=False),)

    def decode(self, codes, shape, dtype):
        return jax.device_put(codes[0], self._back, may_alias=False)

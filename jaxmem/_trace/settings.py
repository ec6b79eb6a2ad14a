"""JAX's settings by which a trace may differ. JAX's contexts are local to a thread."""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax

# The context of each setting, by the setting's name in `jax.config`.
_CONTEXTS: dict[str, Any] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_default_device": jax.default_device,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
}
_values = operator.attrgetter(*_CONTEXTS)


def settings() -> tuple:
    """The values of the settings, and the mesh, in this thread."""
    return _values(jax.config), jax.sharding.get_abstract_mesh()


def settings_of_thread(*others) -> Callable[[], contextlib.AbstractContextManager]:
    """A context in which another thread traces with the settings of this thread.

    others: further contexts to enter, as pairs of a function and its argument.
    """
    contexts = [*zip(_CONTEXTS.values(), _values(jax.config)), *others]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for context, value in contexts:
                stack.enter_context(context(value))
            yield

    return entered

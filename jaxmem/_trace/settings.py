"""JAX's settings of one thread for another thread: JAX's contexts are local to a thread."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax


def settings_of_thread(*others) -> Callable[[], contextlib.AbstractContextManager]:
    """A context in which another thread traces with the settings of this thread.

    others: further contexts to enter, as pairs of a function and its argument.
    """
    config: Any = jax.config  # its options are attributes by name, which types do not tell
    contexts = [
        (jax.enable_x64, config.jax_enable_x64),
        (jax.default_matmul_precision, config.jax_default_matmul_precision),
        (jax.default_device, config.jax_default_device),
        (jax.default_prng_impl, config.jax_default_prng_impl),
        (jax.threefry_partitionable, config.jax_threefry_partitionable),
        (jax.numpy_dtype_promotion, config.jax_numpy_dtype_promotion),
        (jax.numpy_rank_promotion, config.jax_numpy_rank_promotion),
        *others,
    ]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for context, value in contexts:
                stack.enter_context(context(value))
            yield

    return entered

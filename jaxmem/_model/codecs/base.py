"""Defines what a codec is, and the check that all of ours share."""

from typing import ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxmem.errors import TagError
from jaxmem_kernels import references as references

FLOATS = ("bfloat16", "float16", "float32", "float64")


@runtime_checkable
class Codec(Protocol):
    """How a tensor is held between its forward and its backward use; frozen and hashable.

    `encode` and `decode` run under jit, vmap and scan, give the same result for the same input, and
    take any shape, 0-d and empty ones too. A value that is not finite never decodes to a finite
    one. The error bound, and whether the codec is lossless, stand in the codec's own docstring.
    `str(codec)` is its text form: `jaxmem.codecs.parse` inverts it.
    """

    def check(self, shape: tuple[int, ...], dtype) -> None:
        """Raises TagError if the codec takes no array of this shape and dtype."""
        ...

    def encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """The arrays to hold instead of `x`. Raises TagError where `check` does."""
        ...

    def decode(self, codes: tuple[jax.Array, ...], shape: tuple[int, ...], dtype) -> jax.Array:
        """What was encoded, as well as the codes tell.

        codes: what `encode` returned.
        shape, dtype: those of the encoded array, which the codes do not hold.
        """
        ...

    def nbytes(self, shape: tuple[int, ...], dtype) -> int:
        """The exact bytes of `encode`'s arrays for an `x` of this shape and dtype."""
        ...


class Checked:
    """The check of a codec that takes arrays of certain dtypes, whatever their shape.

    name: the codec's, for the message.
    takes: the names of the dtypes.
    """

    name: ClassVar[str]
    takes: ClassVar[tuple[str, ...]] = FLOATS

    def check(self, shape: tuple[int, ...], dtype) -> None:
        # PRNG keys' dtypes are none of numpy's
        name = dtype.name if hasattr(dtype, "name") else jnp.dtype(dtype).name
        if name not in self.takes:
            raise TagError(
                f"{self.name}: `dtype` is {name} (shape {tuple(shape)}); expected one of"
                f" {', '.join(self.takes)}:"
                " keep, recompute or offload this tensor, or give its tag another codec"
            )

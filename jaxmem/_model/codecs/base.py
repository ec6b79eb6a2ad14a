"""The protocol of codecs, and the check of shapes and dtypes that jaxmem's codecs share."""

from typing import ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxmem.errors import TagError
from jaxmem_kernels import references as references

FLOATS = ("bfloat16", "float16", "float32", "float64")


@runtime_checkable
class Codec(Protocol):
    """A method to compress a tensor for the time between its forward and its backward.

    A codec is frozen and hashable. `encode` and `decode` run under jit, vmap and scan. They give
    the same result for the same input, and accept every shape, 0-d and empty shapes included. A
    value that is not finite never decodes to a finite value. The docstring of each codec has its
    error bound, and says whether the codec is lossless. `str(codec)` is the codec's text form,
    which `jaxmem.codecs.parse` reads.
    """

    def check(self, shape: tuple[int, ...], dtype) -> None:
        """Raises TagError if the codec does not support arrays of this shape and dtype."""
        ...

    def encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the codes of `x`: the arrays to store in place of `x`.

        Raises TagError as `check` does.
        """
        ...

    def decode(self, codes: tuple[jax.Array, ...], shape: tuple[int, ...], dtype) -> jax.Array:
        """Returns the array that the codes stand for, up to the error of the codec.

        codes: the arrays that `encode` returned.
        shape, dtype: the shape and the dtype of the encoded array, which the codes do not contain.
        """
        ...

    def nbytes(self, shape: tuple[int, ...], dtype) -> int:
        """Returns the exact number of bytes of the codes of an array with this shape and dtype."""
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

"""The protocol of codecs, and what jaxmem's codecs share: a name, a text form, and the checks of
dtypes and of fields.

A plan's file is read without JAX, and its reader parses the texts of codecs. The files of codecs
therefore import JAX inside their methods, and `jaxmem_kernels` imports JAX when one of its names is
first used. Two classes for each codec were the first choice, one with the fields and one with the
arithmetic. Each codec then had two names, in two files and two tables.
"""

import contextlib
import dataclasses
import difflib
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import jaxmem_kernels as kernels
from jaxmem.errors import TagError

if TYPE_CHECKING:
    import jax

FLOATS = ("bfloat16", "float16", "float32", "float64")
SCALES = ("bfloat16", "float32")


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

    def encode(self, x: "jax.Array") -> "tuple[jax.Array, ...]":
        """Returns the codes of `x`: the arrays to store in place of `x`.

        Raises TagError as `check` does.
        """
        ...

    def decode(self, codes: "tuple[jax.Array, ...]", shape: tuple[int, ...], dtype) -> "jax.Array":
        """Returns the array that the codes stand for, up to the error of the codec.

        codes: the arrays that `encode` returned.
        shape, dtype: the shape and the dtype of the encoded array, which the codes do not contain.
        """
        ...

    def nbytes(self, shape: tuple[int, ...], dtype) -> int:
        """Returns the exact number of bytes of the codes of an array with this shape and dtype."""
        ...


class NamedCodec(Codec):
    """A codec of jaxmem: a frozen dataclass with a text form, `name(field=value,...)`, which takes
    arrays of certain dtypes, whatever their shape. The text has a flag (bool) only if the flag is
    on, and a seed only if the seed is not 0.

    name: the codec's name in its text form and in errors.
    lossless: whether `decode` returns the encoded array, to the bit.
    takes: the names of the dtypes.
    two_valued: whether the codec takes tensors of two values only.
    capacity: number of outlier channels that can be stored exactly; None if the codec separates no
      outliers.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = False
    takes: ClassVar[tuple[str, ...]] = FLOATS
    two_valued: ClassVar[bool] = False
    capacity: int | None = None

    def __str__(self) -> str:
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        values = [(f.name, getattr(self, f.name)) for f in fields]
        shown = (
            f"{name}={'true' if value is True else value}"
            for name, value in values
            if value is not False and (name, value) != ("seed", 0)
        )
        return f"{self.name}({','.join(shown)})"

    def check(self, shape: tuple[int, ...], dtype) -> None:
        # A PRNG key's dtype is not a NumPy dtype.
        name = dtype.name if hasattr(dtype, "name") else dtype_of(dtype).name
        if name not in self.takes:
            raise TagError(
                f"{self.name}: `dtype` is {name} (shape {tuple(shape)}); expected one of"
                f" {', '.join(self.takes)}:"
                " keep, recompute or offload this tensor, or give its tag another codec"
            )

    def with_room_for(self, count: int) -> "NamedCodec":
        """Returns the codec with capacity for `count` outlier channels. A codec that separates no
        outliers is returned unchanged.
        """
        return self


def dtype_of(dtype):
    """Returns the NumPy dtype of a dtype's name, of a type such as `jnp.bfloat16`, or of a
    dtype.
    """
    import jax.numpy as jnp

    return jnp.dtype(dtype)


def references() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which codecs are lowered to their jax.numpy references, without kernels.

    Use the context to compare kernels with their references.
    """
    return kernels.references()


def check_integer(
    codec: str, field: str, value, least: int, multiple: int = 1, most: int | None = None
) -> None:
    """Raises TagError unless `value` is an integer from `least` to `most`, and a multiple of
    `multiple`. There is no upper bound if `most` is None.
    """
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and least <= value <= (value if most is None else most)
        and value % multiple == 0
    ):
        return
    # The message proposes the multiple next to a number below `reach`, and `least` for any other
    # value (NaN is not equal to itself). `-int(-n // m) * m` rounds up to a multiple of m.
    reach = 2**31 if most is None else 2**63
    number = (
        value if isinstance(value, int | float) and value == value and abs(value) < reach else least
    )
    nearest = max(least, -int(-number // multiple) * multiple)
    nearest = nearest if most is None else min(nearest, most)
    limit = "" if most is None else f" and at most {most}"
    even = "n even" if multiple == 2 else "n"
    raise TagError(
        f"{codec}: `{field}` is {value!r}; expected a{even} integer of at least {least}{limit};"
        f" nearest: {nearest}"
    )


def check_flag(codec: str, field: str, value) -> None:
    """Raises TagError unless `value` is a bool."""
    if not isinstance(value, bool):
        near = nearest(str(value).lower(), ("true", "false"))
        raise TagError(f"{codec}: `{field}` is {value!r}; expected true or false; nearest: {near}")


def scale_name(codec: str, value) -> str:
    """Returns the name of a scale's dtype. `value` is a name or a dtype. Raises TagError if scales
    cannot have this dtype.
    """
    # A type such as `jnp.bfloat16` has a `__name__`; the text of a dtype is its name.
    name = value if isinstance(value, str) else getattr(value, "__name__", None) or str(value)
    if name not in SCALES:
        raise TagError(
            f"{codec}: `scale` is {name!r}; expected one of {', '.join(SCALES)}; nearest:"
            f" {nearest(name, SCALES)}"
        )
    return name


def nearest(text: str, allowed) -> str:
    """Returns the allowed word that is spelled most like `text`."""
    return difflib.get_close_matches(text, allowed, n=1, cutoff=0)[0]

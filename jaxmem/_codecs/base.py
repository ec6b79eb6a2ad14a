"""What a codec is, and the text form that all of ours share."""

import dataclasses
import difflib
from typing import ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxmem.errors import TagError
from jaxmem_kernels import references as references

FLOATS = ("bfloat16", "float16", "float32", "float64")
SCALES = ("bfloat16", "float32")


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
        """What was encoded, as well as the codes tell, of the `shape` and `dtype` that it had."""
        ...

    def nbytes(self, shape: tuple[int, ...], dtype) -> int:
        """The exact bytes of `encode`'s arrays for an `x` of this shape and dtype."""
        ...


class TextForm:
    """`name(field=value,...)` of a frozen dataclass; flags (bool) stand there only where they are
    on.
    """

    name: ClassVar[str]
    takes: ClassVar[tuple[str, ...]] = FLOATS  # names of dtypes

    def __str__(self) -> str:
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        values = [(f.name, getattr(self, f.name)) for f in fields]
        shown = (
            f"{name}={'true' if value is True else value}"
            for name, value in values
            if value is not False
        )
        return f"{self.name}({','.join(shown)})"

    def check(self, shape: tuple[int, ...], dtype) -> None:
        # PRNG keys' dtypes are none of numpy's
        name = dtype.name if hasattr(dtype, "name") else jnp.dtype(dtype).name
        if name not in self.takes:
            raise TagError(
                f"{self.name}: `dtype` is {name} (shape {tuple(shape)}); expected one of"
                f" {', '.join(self.takes)}:"
                " keep, recompute or offload this tensor, or give its tag another codec"
            )


def check_integer(codec: str, field: str, value, least: int, multiple: int = 1) -> None:
    """Raises TagError unless `value` is a multiple of `multiple` and not below `least`."""
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and value >= least
        and value % multiple == 0
    ):
        return
    number = (
        value if isinstance(value, int | float) and value == value and abs(value) < 2**31 else least
    )
    nearest = max(least, -int(-number // multiple) * multiple)
    even = "n even" if multiple == 2 else "n"
    raise TagError(
        f"{codec}: `{field}` is {value!r}; expected a{even} integer of at least {least}; nearest:"
        f" {nearest}"
    )


def check_flag(codec: str, field: str, value) -> None:
    """Raises TagError unless `value` is a bool."""
    if not isinstance(value, bool):
        near = nearest(str(value).lower(), ("true", "false"))
        raise TagError(f"{codec}: `{field}` is {value!r}; expected true or false; nearest: {near}")


def scale_name(codec: str, value) -> str:
    """The name of a scale's dtype, given as a name or a dtype. Raises TagError if scales cannot
    have it.
    """
    name = value if isinstance(value, str) else getattr(value, "__name__", None) or str(value)
    if name not in SCALES:
        raise TagError(
            f"{codec}: `scale` is {name!r}; expected one of {', '.join(SCALES)}; nearest:"
            f" {nearest(name, SCALES)}"
        )
    return name


def nearest(text: str, allowed) -> str:
    """The allowed word that is spelled most like `text`."""
    return difflib.get_close_matches(text, allowed, n=1, cutoff=0)[0]

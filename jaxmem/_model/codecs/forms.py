"""Reads and writes codecs as text, and checks their fields. Each codec inherits its name, its
fields and their checks from a class here. Free of JAX, so that a plan's file can be read without
it.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import ClassVar, TypeVar

from jaxmem.errors import TagError

SCALES = ("bfloat16", "float32")
THRESHOLD = 3  # an outlier's standard deviations above the mean (Adacc 3.2)


class TextForm:
    """A frozen dataclass whose text is `name(field=value,...)`. Flags (bool) are written only where
    they are on, and a seed only where it is not 0. `lossless` says whether the codec decodes to
    what was encoded, to the bit.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = False

    def __str__(self) -> str:
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        values = [(f.name, getattr(self, f.name)) for f in fields]
        shown = (
            f"{name}={'true' if value is True else value}"
            for name, value in values
            if value is not False and (name, value) != ("seed", 0)
        )
        return f"{self.name}({','.join(shown)})"


class QuantizedForm(TextForm):
    """The fields of INT4 codecs, with their checks. A codec that lacks one of them has its value
    here, and does not write it into its text.
    """

    group: int = 2
    scale: str = "bfloat16"
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self):
        # A dtype is taken too, and stored as its name; a frozen dataclass allows no assignment.
        object.__setattr__(self, "scale", scale_name(self.name, self.scale))
        check_integer(self.name, "group", self.group, 2, multiple=2)
        check_flag(self.name, "stochastic", self.stochastic)
        check_integer(self.name, "seed", self.seed, 0, most=2**32 - 1)


@dataclasses.dataclass(frozen=True)
class GroupedSymmetricForm(QuantizedForm):
    """Holds the fields of `jaxmem.codecs.GroupedSymmetric`."""

    name: ClassVar[str] = "grouped_symmetric"
    group: int = 64
    scale: str = "bfloat16"
    stochastic: bool = False
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class GroupedAsymmetricForm(QuantizedForm):
    """Holds the fields of `jaxmem.codecs.GroupedAsymmetric`."""

    name: ClassVar[str] = "grouped_asymmetric"
    group: int = 64
    scale: str = "bfloat16"
    stochastic: bool = False
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class ChannelwiseSymmetricForm(QuantizedForm):
    """Holds the fields of `jaxmem.codecs.ChannelwiseSymmetric`."""

    name: ClassVar[str] = "channelwise_symmetric"
    scale: str = "bfloat16"
    stochastic: bool = False
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class NaivePerTokenForm(QuantizedForm):
    """Holds the fields of `jaxmem.codecs.NaivePerToken`."""

    name: ClassVar[str] = "naive_per_token"
    scale: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class OutlierSeparatedForm(QuantizedForm):
    """Holds the fields of `jaxmem.codecs.OutlierSeparated`."""

    name: ClassVar[str] = "outlier_separated"
    group: int = 64
    scale: str = "bfloat16"
    capacity: int = 8
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self):
        check_integer(self.name, "capacity", self.capacity, 0)
        super().__post_init__()


@dataclasses.dataclass(frozen=True)
class BitMaskForm(TextForm):
    """Names `jaxmem.codecs.BitMask`, which has no fields."""

    name: ClassVar[str] = "bit_mask"
    lossless: ClassVar[bool] = True


FORMS: dict[str, type[TextForm]] = {
    form.name: form
    for form in (
        OutlierSeparatedForm,
        GroupedSymmetricForm,
        GroupedAsymmetricForm,
        ChannelwiseSymmetricForm,
        BitMaskForm,
        NaivePerTokenForm,
    )
}

Form = TypeVar("Form")


def parse(text: str) -> TextForm:
    """Returns the name and the checked fields of the codec that `text` describes:
    `str(parse(text))` is the codec's own text.

    Raises TagError as `jaxmem.codecs.parse` does.
    """
    return parse_as(FORMS, text)


def parse_as(forms: Mapping[str, type[Form]], text: str) -> Form:
    """Makes one of `forms`, which are dataclasses by name, from `name(field=value,...)`. Fields
    that are left out have their default.

    Raises TagError if a name, a field or a value is unknown, naming the nearest that is not.
    """
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text) if isinstance(text, str) else None
    if match is None:
        example = str(GroupedSymmetricForm())
        raise TagError(f"`codec` is {text!r}; expected text such as {example!r}")
    name, arguments = match[1], match[2] or ""
    if name not in forms:
        raise TagError(
            f"`codec` is {text!r}: no codec {name!r}; expected one of {', '.join(forms)};"
            f" nearest: {nearest(name, forms)}"
        )
    form = forms[name]
    defaults = {f.name: f.default for f in dataclasses.fields(form)}  # pyright: ignore[reportArgumentType]
    values = {}
    for part in filter(None, (p.strip() for p in arguments.split(","))):
        field, equals, value = (s.strip() for s in part.partition("="))
        if field not in defaults or not equals or field in values:
            raise TagError(_unknown_field(text, name, part, field, equals, defaults))
        values[field] = _value(value, defaults[field])
    return form(**values)


def _unknown_field(text, name, part, field, equals, defaults) -> str:
    """The message for `part` of a codec's `text`, which names no field, no value, or one twice."""
    failed = f"`codec` is {text!r}: {part!r}"
    if not defaults:
        return f"{failed} is unknown; expected no fields in {name}"
    if field in defaults and equals:
        return f"{failed} repeats a field; expected each at most once"
    return (
        f"{failed} is unknown; expected field=value of {', '.join(defaults)}; nearest:"
        f" {nearest(field, defaults)}"
    )


def _value(text: str, default):
    """Returns `text` as a value of the type of `default`, or unchanged where it is none: the
    codec's own check then says what it expects.
    """
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower(), text)
    if isinstance(default, int) and re.fullmatch(r"[+-]?\d{1,10}", text):
        return int(text)
    return text


def check_integer(
    codec: str, field: str, value, least: int, multiple: int = 1, most: int | None = None
) -> None:
    """Raises TagError unless `value` is a multiple of `multiple`, not below `least`, and not above
    `most` where that is given.
    """
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and least <= value <= (value if most is None else most)
        and value % multiple == 0
    ):
        return
    # The nearest is that of a number within reach, and of anything else the least (NaN is not equal
    # to itself). `-int(-n // m) * m` rounds up to a multiple of m.
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
    """Returns the name of a scale's dtype, which is given as a name or a dtype. Raises TagError if
    scales cannot have it.
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

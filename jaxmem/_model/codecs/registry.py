"""Finds a codec by its text form, or by the kind of a tensor. Importing this file imports no
JAX.
"""

import dataclasses
import re

from jaxmem._model.codecs.base import Codec, NamedCodec, nearest
from jaxmem._model.codecs.int4 import (
    ChannelwiseSymmetric,
    GroupedAsymmetric,
    GroupedSymmetric,
    NaivePerToken,
)
from jaxmem._model.codecs.mask import BitMask
from jaxmem._model.codecs.outlier import OutlierSeparated
from jaxmem.errors import TagError

CODECS: dict[str, type[NamedCodec]] = {
    codec.name: codec
    for codec in (
        OutlierSeparated,
        GroupedSymmetric,
        GroupedAsymmetric,
        ChannelwiseSymmetric,
        BitMask,
        NaivePerToken,
    )
}

# Adacc 3.2. The residual stream adds up the outputs of linear layers, and keeps their outlier
# channels.
_BY_KIND: dict[str, Codec] = {
    "linear": OutlierSeparated(),
    "norm": OutlierSeparated(),
    "gelu": OutlierSeparated(),
    "qkv": ChannelwiseSymmetric(),
    "softmax": GroupedAsymmetric(),
    "mask": BitMask(),
    "residual": OutlierSeparated(),
}
_OF_UNKNOWN = GroupedSymmetric()  # needs no knowledge about channels
EXACT = "exact"
KINDS = (*_BY_KIND, EXACT)
"""The kinds of tensor that `jaxmem.tag(..., kind=)` accepts.

The kind selects the codec of a tensor (`default_for`) if neither the tensor's tag nor the plan
names a codec. A plan compresses a tensor of kind `exact` only if the plan's codecs name this kind.
"""


def default_for(kind: str | None) -> Codec | None:
    """Returns the codec for tensors of a kind, after Adacc §3.2.

    kind: one of `KINDS`, or None for tensors without a kind, whose codec is grouped symmetric INT4.
      The kind `exact` has no codec, and the result is None.

    Raises TagError if `kind` is not one of `KINDS`.
    """
    if kind is None:
        return _OF_UNKNOWN
    if not isinstance(kind, str) or kind not in KINDS:
        near = nearest(str(kind), KINDS)
        raise TagError(
            f"`kind` is {kind!r}; expected None or one of {', '.join(KINDS)}; nearest: {near}"
        )
    return _BY_KIND.get(kind)


def parse(text: str) -> NamedCodec:
    """Returns the codec that `text` describes: `parse(str(codec)) == codec`.

    text: the text form, `name(field=value,...)`. A field that is left out has its default.

    Raises TagError for an unknown name, field or value; the message names the nearest known one.
    """
    codec, arguments = _named(text)
    fields = dataclasses.fields(codec)  # pyright: ignore[reportArgumentType]
    defaults = {f.name: f.default for f in fields}
    values = {}
    for part in filter(None, (p.strip() for p in arguments.split(","))):
        field, equals, value = (s.strip() for s in part.partition("="))
        if field not in defaults or not equals or field in values:
            raise TagError(_unknown_field(text, codec.name, part, field, equals, defaults))
        values[field] = _value(value, defaults[field])
    return codec(**values)


def is_lossless(text: str) -> bool:
    """Returns whether the codec that `text` describes is lossless. Raises TagError for an unknown
    name.
    """
    return _named(text)[0].lossless


def _named(text: str) -> tuple[type[NamedCodec], str]:
    """Returns the codec's class, and the text between the parentheses. Raises TagError for an
    unknown name.
    """
    is_text = isinstance(text, str)
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text) if is_text else None
    if match is None:
        example = str(GroupedSymmetric())
        raise TagError(f"`codec` is {text!r}; expected text such as {example!r}")
    if match[1] not in CODECS:
        raise TagError(
            f"`codec` is {text!r}: no codec {match[1]!r}; expected one of {', '.join(CODECS)};"
            f" nearest: {nearest(match[1], CODECS)}"
        )
    return CODECS[match[1]], match[2] or ""


def _unknown_field(text, name, part, field, equals, defaults) -> str:
    """Returns the error message for `part` of a codec's `text`: an unknown field, a field without a
    value, or a repeated field.
    """
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
    """Converts `text` to the type of `default`. Text that is no value of this type is returned
    unchanged, and the codec's check of the field then raises.
    """
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower(), text)
    if isinstance(default, int) and re.fullmatch(r"[+-]?\d{1,10}", text):
        return int(text)
    return text

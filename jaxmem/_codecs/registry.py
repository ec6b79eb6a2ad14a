"""The codecs by name, their text form read back, and the codec of each kind of tensor."""

import dataclasses
import re

from jaxmem._codecs.base import Codec, nearest
from jaxmem._codecs.int4 import (
    ChannelwiseSymmetric,
    GroupedAsymmetric,
    GroupedSymmetric,
    NaivePerToken,
)
from jaxmem._codecs.mask import BitMask
from jaxmem._codecs.outlier import OutlierSeparated
from jaxmem.errors import TagError

CODECS = {
    c.name: c
    for c in (
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
_OF_UNKNOWN = GroupedSymmetric()  # assumes nothing about channels
KINDS = tuple(_BY_KIND)


def default_for(kind: str | None) -> Codec:
    """The codec for tensors of a kind, after Adacc 3.2; None: grouped symmetric INT4.

    Raises TagError if `kind` is none of `KINDS`.
    """
    if kind is None:
        return _OF_UNKNOWN
    if not isinstance(kind, str) or kind not in _BY_KIND:
        near = nearest(str(kind), KINDS)
        raise TagError(
            f"`kind` is {kind!r}; expected None or one of {', '.join(KINDS)}; nearest: {near}"
        )
    return _BY_KIND[kind]


def parse(text: str) -> Codec:
    """The codec that `text` describes: `parse(str(codec)) == codec`.

    `text`: `name(field=value,...)`; fields left out have their default. Raises TagError if a name,
    a field or a value is unknown, naming the nearest that is not.
    """
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text) if isinstance(text, str) else None
    if match is None:
        raise TagError(f"`codec` is {text!r}; expected text such as {str(_OF_UNKNOWN)!r}")
    name, arguments = match[1], match[2] or ""
    if name not in CODECS:
        raise TagError(
            f"`codec` is {text!r}: no codec {name!r}; expected one of {', '.join(CODECS)};"
            f" nearest: {nearest(name, CODECS)}"
        )
    codec = CODECS[name]
    defaults = {f.name: f.default for f in dataclasses.fields(codec)}
    values = {}
    for part in filter(None, (p.strip() for p in arguments.split(","))):
        field, equals, value = (s.strip() for s in part.partition("="))
        if field not in defaults or not equals or field in values:
            raise TagError(_unknown_field(text, name, part, field, equals, defaults))
        values[field] = _value(value, defaults[field])
    return codec(**values)


def _unknown_field(text, name, part, field, equals, defaults) -> str:
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
    """`text` as the type of `default`, or as it is where it cannot be: the codec then says what it
    expects.
    """
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower(), text)
    if isinstance(default, int) and re.fullmatch(r"[+-]?\d{1,9}", text):
        return int(text)
    return text

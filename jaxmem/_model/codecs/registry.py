"""Finds a codec by its text form, or by the kind of a tensor."""

from jaxmem._model.codecs.base import Codec
from jaxmem._model.codecs.forms import nearest, parse_as
from jaxmem._model.codecs.int4 import (
    ChannelwiseSymmetric,
    GroupedAsymmetric,
    GroupedSymmetric,
    NaivePerToken,
)
from jaxmem._model.codecs.mask import BitMask
from jaxmem._model.codecs.outlier import OutlierSeparated
from jaxmem.errors import TagError

_CODECS = (
    OutlierSeparated,
    GroupedSymmetric,
    GroupedAsymmetric,
    ChannelwiseSymmetric,
    BitMask,
    NaivePerToken,
)
CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in _CODECS}

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


def parse(text: str) -> Codec:
    """Returns the codec that `text` describes: `parse(str(codec)) == codec`.

    text: the text form, `name(field=value,...)`. A field that is left out has its default.

    Raises TagError for an unknown name, field or value; the message names the nearest known one.
    """
    return parse_as(CODECS, text)

"""Finds codecs: by name, by their text form, and by the kind of tensor."""

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
"""The kinds of tensor that `jaxmem.tag(..., kind=)` takes. The kind decides which codec compresses
a tensor where neither its tag nor the plan names one (`default_for`). A plan
compresses what is `exact` only where its codecs name that kind.
"""


def default_for(kind: str | None) -> Codec | None:
    """Returns the codec for tensors of a kind, after Adacc 3.2. For no kind (None) it is grouped
    symmetric INT4, and None for `exact`.

    Raises TagError if `kind` is none of `KINDS`.
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

    text: `name(field=value,...)`; fields that are left out have their default.

    Raises TagError if a name, a field or a value is unknown, naming the nearest that is not.
    """
    return parse_as(CODECS, text)

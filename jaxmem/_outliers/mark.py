"""Marks the tags whose outlier channels a codec would separate, where a step is traced for it."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxmem._codecs.outlier import OutlierSeparated
from jaxmem._codecs.registry import default_for, parse
from jaxmem._core.actions import Choice
from jaxmem._tags.policy import Policy
from jaxmem._tags.tag import tag_p

# An identity that stands where a step's forward computes a tensor, for who reads the trace. The
# backward reads it as it does codes, so that no derivative of it is asked for.
mark_p = Primitive("jaxmem_outliers")
mark_p.def_impl(lambda x, **_: x)
mark_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(mark_p, lambda ctx, x, **_: [x])


def _batched(arguments, dims, **params):
    """The batch becomes the first axis: channels are the last one."""
    return mark_p.bind(jnp.moveaxis(arguments[0], dims[0], 0), **params), 0


batching.primitive_batchers[mark_p] = _batched


class Marking:
    """Decisions under which every block marks its tensors, and keeps none of them. It is given to
    `build` where a plan is.
    """

    def choices_for(self, block: str) -> Mapping[str, Choice]:
        return {}

    def groups(self, block: str) -> tuple[tuple[int, int], ...]:
        return ()

    def policy_for(self, label: str, layers: int) -> Policy:
        return MarkingPolicy(label, (), layers)


class MarkingPolicy(Policy):
    """Answers that a tensor with outliers is kept, marked."""

    def __call__(self, primitive, *avals, **params):
        separates = primitive is tag_p and separates_outliers(params["kind"], params["codec"])
        return _Marked(self.block, params["name"]) if separates else False


@dataclasses.dataclass(frozen=True)
class _Marked:
    """What the tag's rule calls, as it does a codec."""

    block: str
    name: str

    def encode(self, x):
        return (mark_p.bind(x, block=self.block, name=self.name),)

    def decode(self, codes, shape, dtype):
        return codes[0]


def separates_outliers(kind: str | None, codec: str | None) -> bool:
    """Whether a tag's own codec, or its kind's, is the one that separates outlier channels."""
    own = default_for(kind) if codec is None else parse(codec)
    return isinstance(own, OutlierSeparated)

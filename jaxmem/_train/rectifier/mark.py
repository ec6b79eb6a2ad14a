"""Marks the tags whose outlier channels a codec may separate, where a step is traced for it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxmem._core.actions import Choice
from jaxmem._cost.profile.options import codecs_for
from jaxmem._model.codecs.outlier import OutlierSeparated
from jaxmem._model.tags.policy import Policy
from jaxmem._model.tags.tag import tag_p

# An identity that stands where a step's forward computes a tensor, for who reads the trace.
mark_p = Primitive("jaxmem_outliers")
mark_p.def_impl(lambda x, **_: x)
mark_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(mark_p, lambda ctx, x, **_: [x])


def _batched(arguments, dims, *, several, **params):
    """What is batched after a forward was parted from its backward are tensors with codes of their
    own, unlike a batch that a tag sees: they lie along the first axis.
    """
    x = jnp.moveaxis(arguments[0], dims[0], 0)
    return mark_p.bind(x, several=several + 1, **params), 0


batching.primitive_batchers[mark_p] = _batched


class Marking:
    """Decisions under which every block marks its tensors, and keeps none of them. It is given to
    `build` where a plan is.

    codecs: as `jaxmem.plan` takes them.
    """

    def __init__(self, codecs: Any = None):
        self._codecs = codecs

    def choices_for(self, block: str) -> Mapping[str, Choice]:
        return {}

    def groups(self, block: str) -> tuple[tuple[int, int], ...]:
        return ()

    def policy_for(self, label: str, layers: int) -> Policy:
        return _MarkingPolicy(label, (), layers, _Codecs(self._codecs))


@dataclasses.dataclass(frozen=True, eq=False)
class _Codecs:
    """What users gave, which need not be hashable; a policy must."""

    given: Any


@dataclasses.dataclass(frozen=True)
class _MarkingPolicy(Policy):
    """Answers that every tensor is recomputed, and marked in the forward where it may have outliers
    that a codec separates.
    """

    codecs: _Codecs = _Codecs(None)

    def __call__(self, primitive, *avals, **params):
        if primitive is not tag_p:
            return False
        codecs = codecs_for(params["kind"], params["codec"], avals[0].dtype, self.codecs.given)
        separates = any(isinstance(codec, OutlierSeparated) for codec in codecs)
        inexact = jnp.issubdtype(avals[0].dtype, jnp.floating)
        return _Seen(self.block, params["name"]) if separates and inexact else False


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A tag's forward is marked: on its way to what follows, so that it stays in the program."""

    block: str
    name: str

    def seen(self, x):
        return mark_p.bind(x, block=self.block, name=self.name, several=0)

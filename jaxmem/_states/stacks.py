"""A model's layers as several stacks, since arrays of one stack lie in one memory."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Stacks:
    """The arrays of a model's layers, divided after some of them.

    parts: trees of the same structure in the layers' order; the arrays of each have a leading axis
      of as many layers as the part has.
    """

    parts: tuple[Any, ...]


def parts_of(layers) -> tuple[Any, ...]:
    """The stacks of `layers`: those of `Stacks`, or the one that any other tree is."""
    return layers.parts if isinstance(layers, Stacks) else (layers,)


def like(layers, parts):
    """Puts stacks together in the form that `layers` has."""
    return Stacks(tuple(parts)) if isinstance(layers, Stacks) else next(iter(parts))


def joined(layers):
    """The stacks of `layers` as one."""
    if not isinstance(layers, Stacks):
        return layers
    return jax.tree.map(lambda *a: jnp.concatenate(a), *layers.parts)


def joined_shapes(layers):
    """The shapes of `joined(layers)`, wherever its stacks lie."""

    def one(*arrays):
        count = sum(a.shape[0] for a in arrays)
        return jax.ShapeDtypeStruct((count, *arrays[0].shape[1:]), arrays[0].dtype)

    return jax.tree.map(one, *parts_of(layers))


def length(stacked) -> int:
    """How many layers one stack has."""
    return jax.tree.leaves(stacked)[0].shape[0]

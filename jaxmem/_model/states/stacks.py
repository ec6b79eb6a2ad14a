"""A model's layers as several stacks, since arrays of one stack lie in one memory."""

import dataclasses
import functools
from typing import Any

import jax


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["buffers"])
@dataclasses.dataclass(frozen=True)
class Stacks:
    """The arrays of a model's layers, divided after some of them.

    parts: trees of the same structure in the layers' order, or `Copied` of such trees; the arrays
      of each have a leading axis of as many layers as the part has.
    buffers: how many layers, the last ones, keep on the device from forward to backward what they
      fetched of their parameters (ProTrain's n_buffer).
    """

    parts: tuple[Any, ...]
    buffers: int = 0


@functools.partial(jax.tree_util.register_dataclass, data_fields=["copy", "master"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Copied:
    """Parameters of layers twice: what the layers compute with, and what is updated.

    copy: the stacked parameters in device memory, in the dtype that the layers compute in.
    master: the same in the parameters' own dtype, in host memory.
    """

    copy: Any
    master: Any


def parts_of(layers) -> tuple[Any, ...]:
    """The stacks of `layers`: those of `Stacks`, or the one that any other tree is."""
    return layers.parts if isinstance(layers, Stacks) else (layers,)


def read_of(layers) -> tuple[Any, ...]:
    """The stacks that the layers compute with."""
    return tuple(p.copy if isinstance(p, Copied) else p for p in parts_of(layers))


def masters_of(layers) -> tuple[Any, ...]:
    """The stacks that hold the parameters themselves."""
    return tuple(p.master if isinstance(p, Copied) else p for p in parts_of(layers))


def buffers_of(layers) -> int:
    """How many of the last layers keep what they fetched; see `Stacks`."""
    return layers.buffers if isinstance(layers, Stacks) else 0


def like(layers, parts):
    """Puts stacks together in the form that `layers` has."""
    return Stacks(tuple(parts), layers.buffers) if isinstance(layers, Stacks) else next(iter(parts))


def joined_shapes(layers):
    """The shapes of the parameters' stacks as one, wherever they lie."""

    def one(*arrays):
        count = sum(a.shape[0] for a in arrays)
        return jax.ShapeDtypeStruct((count, *arrays[0].shape[1:]), arrays[0].dtype)

    return jax.tree.map(one, *masters_of(layers))


def one_layer(stacked):
    """The shapes of one layer of a stack."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked)


def length(stacked) -> int:
    """How many layers one stack has."""
    return jax.tree.leaves(stacked)[0].shape[0]

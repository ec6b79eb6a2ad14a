"""Reads a checkpoint of a run whose layers were divided into other stacks than the layers of the
resumed run: all layers on the device, or some in host memory.
"""

import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxmem._train.checkpoints import stored
from jaxmem._train.checkpoints.manifest import Leaf

# The path of a stack in `jaxmem._model.states.layout`, and the form of its parameters: a copy in
# the dtype of compute, or the master.
_PART = re.compile(r"\.parts\[(\d+)\](\.copy|\.master)?")
Shapes = Sequence[tuple[str, tuple[int, ...]]]
Like = Sequence[tuple[Any, Any]]  # leaves of a state with their paths


def read(folder: pathlib.Path, leaves: Sequence[Leaf], like: Like) -> list:
    """Reads the array of each leaf of `like` from a checkpoint, as `stored.read` does. If the state
    divides layers into other stacks than the checkpoint, the arrays of layers are divided anew.

    Raises RunError, which names an array, if `like` is another state.
    """
    paths = [jax.tree_util.keystr(path) for path, _ in like]
    shapes = [(path, np.shape(was)) for path, (_, was) in zip(paths, like, strict=True)]
    if not _differ_in_stacks([(leaf.path, leaf.shape) for leaf in leaves], shapes):
        return stored.read(folder, leaves, like)
    whole = _joined(leaves, stored.arrays(folder, leaves))
    begun = dict.fromkeys(whole, 0)
    found = []
    for path, (_, was) in zip(paths, like, strict=True):
        name, form = _whole(path)
        array, leaf = whole[name]
        if form is not None:
            begin = begun[name]
            array = array[begin : begin + was.shape[0]].astype(was.dtype)
            if form != ".copy":  # which is of the same layers as the stack after it
                begun[name] = begin + was.shape[0]
        if array.shape != was.shape:
            holds = f"{name} {list(whole[name][0].shape)}"
            raise stored.another_state(f"{holds} where the state has {path} {list(was.shape)}")
        found.append(stored.placed(array, leaf, was))
    return found


def _whole(path: str) -> tuple[str, str | None]:
    """The path of the array of all layers, and which form of it the stack at `path` holds; None for
    an array outside stacks.
    """
    part = _PART.search(path)
    if part is None:
        return path, None
    return path[: part.start()] + path[part.end() :], part[2] or ""


def _differ_in_stacks(stored: Shapes, wanted: Shapes) -> bool:
    """Whether two lists of paths and shapes are of one state whose layers are divided into
    different stacks.
    """
    names = [{_whole(path)[0] for path, _ in shapes} for shapes in (stored, wanted)]
    stacks = [
        [(path, shape) for path, shape in shapes if _whole(path)[1] is not None]
        for shapes in (stored, wanted)
    ]
    return stacks[0] != stacks[1] and names[0] == names[1]


def _joined(leaves: Sequence[Leaf], arrays: Sequence[np.ndarray]) -> dict[str, tuple[Any, Leaf]]:
    """The array of all layers by its path, each with its description."""
    pieces: dict[str, list] = {}
    of: dict[str, Leaf] = {}
    for leaf, array in zip(leaves, arrays, strict=True):
        name, form = _whole(leaf.path)
        if form == ".copy":
            continue
        pieces.setdefault(name, []).append(array)
        of.setdefault(name, leaf)
    return {
        name: (found[0] if len(found) == 1 else np.concatenate(found), of[name])
        for name, found in pieces.items()
    }

"""Reads the distributed folders of CIFAR-10 and CIFAR-100: pickles of Python 2, read without
running code from them.
"""

import pathlib
import pickle
from typing import Any

import numpy as np

from experiments.errors import InputError

SIDE = 32
Side = tuple[np.ndarray, np.ndarray]  # uint8 (N, 32, 32, 3), int32 (N,)


def cifar_10(folder: pathlib.Path) -> tuple[Side, Side, int]:
    """Returns training images, test images, and the number of classes."""
    classes = _names(folder / "batches.meta", b"label_names")
    parts = [_side(folder / f"data_batch_{i}", b"labels", classes) for i in range(1, 6)]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts))
    return (images, labels), _side(folder / "test_batch", b"labels", classes), classes


def cifar_100(folder: pathlib.Path) -> tuple[Side, Side, int]:
    """Returns training images and test images with the fine labels, and the number of classes."""
    classes = _names(folder / "meta", b"fine_label_names")
    train, test = (_side(folder / side, b"fine_labels", classes) for side in ("train", "test"))
    return train, test, classes


class Dtype:
    """Replaces a NumPy dtype by its name. The rest of a pickled dtype could make NumPy read bytes
    as pointers.
    """

    def __init__(self, name, *_):
        self.name = name.decode("ascii", "replace") if isinstance(name, bytes) else str(name)

    def __setstate__(self, state):
        """Ignores byte order and flags: an unsigned byte has neither."""


class Array:
    """Replaces a NumPy array by its pickled state, which is checked before NumPy reads it."""

    state: Any = None

    def __init__(self, *_):
        pass

    def __setstate__(self, state):
        self.state = state

    def value(self) -> np.ndarray:
        """Returns the array of unsigned bytes. Raises ValueError for any other state."""
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise ValueError("an array without its values")
        _, shape, dtype, by_columns, data = self.state
        if not isinstance(dtype, Dtype) or dtype.name not in ("u1", "uint8"):
            raise ValueError(
                f"an array of {getattr(dtype, 'name', type(dtype).__name__)}, and only u1 is"
                " allowed"
            )
        if not isinstance(data, bytes):
            raise ValueError(f"an array whose values are a {type(data).__name__}")
        return np.frombuffer(data, np.uint8).reshape(shape, order="F" if by_columns else "C")


STANDS_FOR = {
    ("numpy.core.multiarray", "_reconstruct"): Array,
    ("numpy._core.multiarray", "_reconstruct"): Array,
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): Dtype,
}
BROKEN = (  # the errors of unpickling bytes that are no pickle
    pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, ImportError, LookupError,
    MemoryError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class Arrays(pickle.Unpickler):
    """Replaces arrays and looks up no other name: a pickle may name and call any function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in STANDS_FOR:
            return STANDS_FOR[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only arrays are allowed")


def _load(path: pathlib.Path) -> dict:
    try:
        with path.open("rb") as file:
            found = Arrays(file, encoding="bytes").load()
        if isinstance(found, dict):
            found = {
                key: value.value() if isinstance(value, Array) else value
                for key, value in found.items()
            }
    except OSError as error:
        raise InputError(
            f"data.path: cannot read {path}: {error.strerror}; allowed: a folder with all of"
            " CIFAR's files"
        ) from error
    except BROKEN as error:
        raise InputError(
            f"data.path: {path} is not CIFAR's: {str(error) or type(error).__name__}; allowed: a"
            " pickle of a dict of arrays"
        ) from error
    if not isinstance(found, dict):
        raise InputError(f"data.path: {path} holds a {type(found).__name__}; allowed: a dict")
    return found


def _names(path: pathlib.Path, key: bytes) -> int:
    names = _load(path).get(key)
    if not isinstance(names, list) or len(names) < 2:
        raise InputError(
            f"data.path: {path} has {names!r} for {key.decode()}; allowed: a list of names"
        )
    return len(names)


def _side(path: pathlib.Path, key: bytes, classes: int) -> Side:
    found = _load(path)
    data, labels = found.get(b"data"), found.get(key)
    width = 3 * SIDE * SIDE
    if not isinstance(data, np.ndarray) or data.shape[1:] != (width,) or not len(data):
        got = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise InputError(f"data.path: {path} has {got} for data; allowed: uint8 (N, {width})")
    if (
        not isinstance(labels, list)
        or len(labels) != len(data)
        or not all(type(label) is int for label in labels)
    ):
        got = f"{len(labels)} of them" if isinstance(labels, list) else type(labels).__name__
        raise InputError(
            f"data.path: {path} has {got} for {key.decode()}; allowed: {len(data)} whole numbers"
        )
    if wrong := [label for label in labels if not 0 <= label < classes]:
        raise InputError(f"data.path: {path} has a label {wrong[0]}; allowed: 0 to {classes - 1}")
    images = data.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), np.array(labels, np.int32)

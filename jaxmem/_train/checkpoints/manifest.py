"""A checkpoint's manifest: which files it has, with their SHA-256 sums, and what they hold. It is
written last, so that a checkpoint with one is whole, and one whose files are others is found out.
"""

import dataclasses
import fnmatch
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmem._core.files import flush_folder, read_json, write_json

NAME = "manifest.json"
_SCHEMA = 1
# What systems put beside files unasked: macOS, Windows, NFS for files that are removed while open.
_STRAY = ".DS_Store", "._*", "Thumbs.db", "desktop.ini", ".nfs*"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a state.

    path: where it stands in the tree, as JAX writes it.
    shape, dtype: those of the array; of a random key, of its data.
    key: the random keys' implementation, or None for other arrays.
    kind: "array", of JAX's; "numpy"; or "number", of Python's.
    weak: whether an array has a weak type.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    key: str | None = None
    kind: str = "array"
    weak: bool = False


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    step: how many steps were done.
    leaves: the arrays of its state, in the tree's order.
    notes: what else the run needs to go on, as JSON.
    """

    step: int
    leaves: tuple[Leaf, ...]
    notes: Mapping[str, Any]


def names(folder: pathlib.Path) -> list[str]:
    """The names of the files that a manifest of the folder would list."""
    return sorted(_files(folder))


def summed(folder: pathlib.Path, names: Sequence[str]) -> dict[str, list]:
    """Sums up files of the folder, and sees to it that they are on the disk: the length and the sum
    of each.
    """
    found = {name: list(_sum(folder / name, flush=True)) for name in names}
    for inner in {(folder / name).parent for name in names}:
        flush_folder(inner)
    return found


def write(
    folder: pathlib.Path,
    step: int,
    leaves: tuple[Leaf, ...],
    notes: Mapping[str, Any],
    files: Mapping[str, list],
) -> None:
    """Writes the manifest of a folder with these files, as `summed` tells them."""
    data = {
        "schema": _SCHEMA,
        "step": step,
        "leaves": [dataclasses.asdict(leaf) for leaf in leaves],
        "notes": dict(notes),
        "files": dict(files),
    }
    write_json(folder / NAME, data | {"sha256": _own_sum(data)})


def verified(folder: pathlib.Path, step: int) -> Manifest:
    """The manifest of the checkpoint of that step, all of whose files are those that were written.

    Raises ValueError, which says what differs, if they are not; OSError if they cannot be read.
    """
    data = _read(folder, step)
    there, listed = _files(folder), data["files"]
    for name in sorted(listed.keys() ^ there.keys()):
        raise ValueError(f"{name}: it is {'missing' if name in listed else 'not of it'}")
    for name, path in sorted(there.items()):
        if list(_sum(path)) != listed[name]:
            raise ValueError(f"{name}: its bytes are not those that were written")
    return _made(data)


def opened(folder: pathlib.Path, step: int) -> Manifest:
    """The same of a checkpoint that another process has found whole."""
    return _made(_read(folder, step))


def _made(data: Mapping[str, Any]) -> Manifest:
    leaves = tuple(Leaf(**leaf | {"shape": tuple(leaf["shape"])}) for leaf in data["leaves"])
    return Manifest(data["step"], leaves, data["notes"])


def notes(folder: pathlib.Path, step: int) -> Mapping[str, Any]:
    """What was noted with the checkpoint of that step, whose other files are not looked at; nothing
    where its manifest cannot be read.
    """
    try:
        return _read(folder, step)["notes"]
    except (ValueError, OSError, KeyError):
        return {}


def _read(folder: pathlib.Path, step: int) -> dict[str, Any]:
    """What the manifest says, which must be of that step."""
    try:
        data = read_json(folder / NAME)
    except FileNotFoundError:
        raise ValueError(f"it has no {NAME}") from None
    except ValueError as error:
        raise ValueError(f"{NAME}: {error}") from error
    if not isinstance(data, dict) or data.pop("sha256", None) != _own_sum(data):
        raise ValueError(f"{NAME}: it does not have its own sum")
    if data.get("schema") != _SCHEMA:
        raise ValueError(f"{NAME}: its schema is {data.get('schema')!r}; expected {_SCHEMA}")
    if data["step"] != step:
        raise ValueError(f"{NAME}: it is that of step {data['step']}")
    return data


def _files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The files in the folder and below, but for the manifest, what hides what is not whole, and
    what is nobody's.
    """
    found = (path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    names = {path.relative_to(folder).as_posix(): path for path in found}
    return {
        name: path
        for name, path in names.items()
        if name != NAME and not name.startswith(f".{NAME}.") and not is_stray(path.name)
    }


def is_stray(name: str) -> bool:
    """Whether a file of this name is the operating system's."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _STRAY)


def _sum(path: pathlib.Path, flush: bool = False) -> tuple[int, str]:
    with path.open("rb") as file:
        sums = hashlib.file_digest(file, "sha256")
        size = file.tell()
        if flush:
            os.fsync(file.fileno())
    return size, sums.hexdigest()


def _own_sum(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()

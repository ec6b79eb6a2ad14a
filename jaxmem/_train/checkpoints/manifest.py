"""A checkpoint's manifest: the names of its files, their SHA-256 sums, and the arrays in them. The
manifest is written last, so that a checkpoint with a manifest is complete. The sums detect a file
that was changed later.
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
from jaxmem._core.reader import Broken, Reader

NAME = "manifest.json"
_SCHEMA = 1
# Files that systems add to folders: macOS, Windows, and NFS for files that are removed while open.
_STRAY = ".DS_Store", "._*", "Thumbs.db", "desktop.ini", ".nfs*"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a state.

    path: the path in the state's tree, as JAX writes it.
    shape, dtype: the shape and the dtype of the array, or of the data of a random key.
    key: the implementation of random keys. None for other arrays.
    kind: "array" for JAX's arrays, "numpy" for NumPy's, "number" for Python's numbers.
    weak: whether the array has a weak type.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    key: str | None = None
    kind: str = "array"
    weak: bool = False


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    step: number of finished steps.
    leaves: the arrays of the state, in the order of its tree.
    notes: the other values that a resumed run needs, as JSON.
    files: name of a file -> its length and its SHA-256 sum.
    """

    step: int
    leaves: tuple[Leaf, ...]
    notes: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]


_READER = Reader(whole=(Leaf,))


def names(folder: pathlib.Path) -> list[str]:
    """The names of the files that a manifest of the folder would list."""
    return sorted(_files(folder))


def summed(folder: pathlib.Path, names: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Flushes files of the folder to the disk, and returns the length and the sum of each."""
    found = {name: _sum(folder / name, flush=True) for name in names}
    for inner in {(folder / name).parent for name in names}:
        flush_folder(inner)
    return found


def write(folder: pathlib.Path, content: Manifest) -> None:
    """Writes the manifest of a folder. `content.files` are as `summed` returns them."""
    data = {"schema": _SCHEMA} | _READER.plain(content)
    write_json(folder / NAME, data | {"sha256": _own_sum(data)})


def verified(folder: pathlib.Path, step: int) -> Manifest:
    """Reads the manifest of the checkpoint of a step, and compares all files with it.

    Raises ValueError, which names the difference, if a file is another one; OSError if a file
    cannot be read.
    """
    found, there = open_manifest(folder, step), _files(folder)
    for name in sorted(found.files.keys() ^ there.keys()):
        raise ValueError(f"{name}: it is {'missing' if name in found.files else 'not of it'}")
    for name, path in sorted(there.items()):
        if _sum(path) != found.files[name]:
            raise ValueError(f"{name}: its bytes are not those that were written")
    return found


def open_manifest(folder: pathlib.Path, step: int) -> Manifest:
    """Reads the manifest of the checkpoint of a step, and none of its other files.

    Raises ValueError, which names the difference, if the manifest is broken; OSError if the
    manifest cannot be read.
    """
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
    try:
        found = _READER.read(Manifest, data)
    except Broken as broken:
        raise ValueError(f"{NAME}: {broken}") from broken
    if found.step != step:
        raise ValueError(f"{NAME}: it is that of step {found.step}")
    return found


def notes(folder: pathlib.Path, step: int) -> Mapping[str, Any]:
    """The notes of the checkpoint of a step, whose other files are not read. Empty if its manifest
    cannot be read.
    """
    try:
        return open_manifest(folder, step).notes
    except (ValueError, OSError):
        return {}


def _files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The files in the folder and below, without the manifest, unfinished manifests, and files of
    the operating system.
    """
    found = (path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    names = {path.relative_to(folder).as_posix(): path for path in found}
    return {
        name: path
        for name, path in names.items()
        if name != NAME and not name.startswith(f".{NAME}.") and not is_stray(path.name)
    }


def is_stray(name: str) -> bool:
    """Whether a file of this name belongs to the operating system."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _STRAY)


def _sum(path: pathlib.Path, flush: bool = False) -> tuple[int, str]:
    """The size and the digest of a file."""
    with path.open("rb") as file:
        sums = hashlib.file_digest(file, "sha256")
        size = file.tell()
        if flush:
            os.fsync(file.fileno())
    return size, sums.hexdigest()


def _own_sum(data: Mapping[str, Any]) -> str:
    """The digest of a manifest's own content."""
    text = json.dumps(data, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()

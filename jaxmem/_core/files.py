"""Writes files that appear whole or not at all, and reads JSON files."""

import contextlib
import json
import os
import pathlib
import secrets
import tempfile
from typing import Any


def write_whole(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes a file atomically: a reader sees the old content or the whole new content.

    The content is written to a temporary file in the same folder and flushed to the disk. The
    temporary file is then renamed to `path` in one step. Last, the folder is flushed, so that the
    new name survives a power failure.

    path: the file. A missing folder is made.
    content: bytes, or a text, which is written as UTF-8.

    Raises OSError if the file cannot be written. No part of the content remains in this case.
    """
    path = _path_of_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    # Process and random digits keep two writers apart; the dot hides the file after a crash.
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    flush_folder(path.parent)


def _path_of_file(path: str | os.PathLike) -> pathlib.Path:
    """The absolute path of a file to write. Raises OSError for the path of a folder."""
    path = pathlib.Path(path).absolute()
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; expected the name of a file")
    return path


def write_json(path: str | os.PathLike, data: Any) -> None:
    """Writes `data` as JSON by `write_whole`. Raises ValueError if it holds nan or infinities."""
    write_whole(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike) -> Any:
    """Returns the content of a JSON file. Raises OSError if the file cannot be read, and ValueError
    if it is no JSON or an object has a key twice.
    """
    return parse_json(pathlib.Path(path).read_text(encoding="utf-8"))


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError like `read_json`."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError(f"it is nested too deeply: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict. Raises ValueError for a key that occurs twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice in an object")
        found[key] = value
    return found


def check_writable(path: str | os.PathLike) -> None:
    """Raises OSError unless a file can be written at `path`: before long work, not after it.

    A temporary file is made in the same folder and removed, because permissions do not show full
    disks and read-only file systems. Missing folders are not made.
    """
    path = _path_of_file(path)
    parent = next(p for p in path.parents if p.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"{str(parent)!r} is a file; expected a folder")
    with tempfile.TemporaryFile(prefix=f".{path.name[:32]}.", dir=parent) as file:
        file.write(b"\n")


def flush_folder(folder: pathlib.Path) -> None:
    """Writes a folder's list of names to the disk, where the system can."""
    with contextlib.suppress(OSError):  # some file systems cannot, and Windows has no such call
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""Remembers in SQLite what was timed and compiled before: times under the text of the work that was
timed (Adacc §3.1), results of compiles under the program's bytes.

A database that cannot be read or written costs speed, never a plan.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import platformdirs

from jaxmem._core.sqlite import SqliteFile
from jaxmem._core.versions import installed

MOST_BYTES = 256 * 2**20
LAYOUT = 1  # of the tables; files without checksums have 0, and are emptied
COLUMNS = {
    "key": "TEXT PRIMARY KEY",
    "device": "TEXT",
    "jaxlib": "TEXT",
    "written": "REAL",  # seconds since 1970
    "checksum": "INTEGER",  # SQLite has none, and would read flipped bits as other numbers
    "value": "TEXT",  # JSON; last, so that the other columns are read without its pages
}
_READ = "key, written, checksum, value"
TABLES = ("times", "compiles", "tried")


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of a piece of work.

    seconds: the least of some runs.
    spread: how far the median of the runs lay above the least, as a share of it, for most of the
      pieces that were measured together; 0 for an estimate.
    written: when it was stored, in seconds since 1970.
    """

    seconds: float
    spread: float = 0.0
    written: float = 0.0


class Usage(NamedTuple):
    """What the database takes.

    path: its file.
    bytes: the bytes of all its files.
    rows: the number of rows by table.
    """

    path: pathlib.Path
    bytes: int
    rows: dict[str, int]


def default_path() -> pathlib.Path:
    """`profile.sqlite` in the user's cache folder: `~/.cache/jaxmem` or `$XDG_CACHE_HOME/jaxmem` on
    Linux.
    """
    return platformdirs.user_cache_path("jaxmem", appauthor=False) / "profile.sqlite"


class Database:
    """Reads and writes times of pieces of work on a device, results of deviceless compiles, which
    are the same every time, and what earlier searches tried.

    Every key holds the versions of jaxlib and of the kernels' compilers, so that nothing from
    another version is found.

    path: the file; None means `default_path()`.
    since: what was written earlier, in seconds since 1970, is not read.
    most_bytes: beyond it the oldest rows are dropped.
    """

    def __init__(
        self,
        path: pathlib.Path | None = None,
        since: float = 0.0,
        most_bytes: int = MOST_BYTES,
    ):
        self.path, self.since = path or default_path(), since
        tables: dict[str, dict[str, str]] = dict.fromkeys(TABLES, COLUMNS)
        self._file = SqliteFile(self.path, tables, LAYOUT, most_bytes)
        self._jaxlib = installed("jaxlib")
        self._kernels = " ".join(f"{name} {installed(name)}" for name in ("jax-triton", "triton"))

    def read_times(self, device: str, source: str, texts: Sequence[str]) -> dict[str, Timing]:
        """The times of those of `texts` that are known.

        device: the device that they were taken on.
        source: what took them, such as "measured".
        texts: the pieces of work, each as a text that is equal for equal work.
        """
        keys = {self._key(device, source, text): text for text in texts}
        found = self._get("times", list(keys))
        return {keys[key]: timing for key, row in found if (timing := _timing(*row)) is not None}

    def write_times(self, device: str, source: str, times: Mapping[str, Timing]) -> None:
        values = {self._key(device, source, t): [x.seconds, x.spread] for t, x in times.items()}
        self._put("times", device, values)

    def read_compile(self, device: str, program: bytes) -> dict | None:
        """What a compile of `program` for `device` said, if it is known."""
        # one row, or none
        for _, (result, _) in self._get("compiles", [self._key(device, program)]):
            return result if isinstance(result, dict) else None
        return None

    def write_compile(self, device: str, program: bytes, result: dict) -> None:
        self._put("compiles", device, {self._key(device, program): result})

    def read_tried(self, device: str, step: str, most: int) -> list[tuple[str, str]]:
        """Actions and results of the latest `most` compiles of `step`, oldest first."""
        prefix = self._key(device, step)
        rows = self._file.read(  # a range of keys, which the index finds; `;` is next after `:`
            f"SELECT {_READ} FROM tried WHERE key > ? AND key < ? AND written >= ?"
            " ORDER BY written DESC, rowid DESC LIMIT ?",
            (f"{prefix}:", f"{prefix};", self.since, most),
        )
        return [(v[0], v[1]) for _, (v, _) in _sound(rows) if _are_texts(v)][::-1]

    def write_tried(self, device: str, step: str, actions: str, result: str) -> None:
        key = f"{self._key(device, step)}:{self._key(actions)}"
        self._put("tried", device, {key: [actions, result]})

    def _key(self, *parts: str | bytes) -> str:
        """A hash of versions and parts. A zero byte stands before each part, so that no two lists
        of parts run together to the same text.
        """
        digest = hashlib.sha256(f"{self._jaxlib} {self._kernels}".encode())
        for part in parts:
            digest.update(b"\0" + (part if isinstance(part, bytes) else part.encode()))
        return digest.hexdigest()

    def _get(self, table: str, keys: list[str]) -> Iterator[tuple[str, tuple[Any, float]]]:
        marks = ", ".join("?" * len(keys))
        query = f"SELECT {_READ} FROM {table} WHERE key IN ({marks}) AND written >= ?"
        return _sound(self._file.read(query, (*keys, self.since)))

    def _put(self, table: str, device: str, values: Mapping[str, Any]) -> None:
        now, texts = time.time(), {key: json.dumps(value) for key, value in values.items()}
        rows = [(k, device, self._jaxlib, now, _checksum(k, t), t) for k, t in texts.items()]
        if rows:
            self._file.write(table, rows)


def usage() -> Usage:
    """Returns what the database takes; no rows are counted where it is damaged or not there."""
    file = Database()._file
    rows: dict[str, int] = dict.fromkeys(TABLES, 0)
    if os.path.isfile(file.path) and check() is None:
        for name in TABLES:
            rows[name] = sum(found for (found,) in file.read(f"SELECT count(*) FROM {name}", ()))
    return Usage(file.path, sum(os.path.getsize(path) for path in file.files()), rows)


def clear() -> int:
    """Removes the database and the copy of a damaged one; returns the bytes that this freed.

    Raises OSError if a file cannot be removed.
    """
    freed = 0
    for path in reversed(Database()._file.files()):  # journals go before the file that they are of
        with contextlib.suppress(FileNotFoundError):  # SQLite removes its own, whenever it is done
            size = os.path.getsize(path)
            path.unlink()
            freed += size
    return freed


def check() -> str | None:
    """Says what is wrong with the database, by SQLite's quick check; None where it is good or not
    made yet. Changes nothing.
    """
    try:
        return Database()._file.fault()
    except (sqlite3.Error, OSError) as error:
        return f"it cannot be read: {error}"


def _sound(rows: Iterable[tuple]) -> Iterator[tuple[str, tuple[Any, float]]]:
    """Key, value and time of each row whose checksum is that of its text. Rows with flipped bits
    are left out, as if they had never been written.
    """
    for key, written, checksum, text in rows:
        right = isinstance(text, str) and isinstance(written, float)  # SQLite does not insist
        if right and checksum == _checksum(key, text):
            try:
                yield key, (json.loads(text), written)
            except ValueError:
                continue


def _checksum(key: str, text: str) -> int:
    return zlib.crc32(f"{key}\0{text}".encode(errors="replace"))


def _timing(value: Any, written: float) -> Timing | None:
    """A row of times as it was written, or None where its value is no time."""
    try:
        seconds, spread = (float(number) for number in value)
    except (TypeError, ValueError):
        return None
    good = math.isfinite(seconds) and seconds >= 0 and spread >= 0
    return Timing(seconds, spread, written) if good else None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(t, str) for t in value)

"""What was timed and compiled before, in SQLite: times by the work's own text (Adacc §3.1, A1),
bytes by the program's.

A database that cannot be read or written costs speed, never a plan.
"""

import hashlib
import json
import os
import pathlib
import sqlite3
from collections.abc import Mapping, Sequence

from jaxmem._core.versions import installed

_TABLES = (
    "CREATE TABLE IF NOT EXISTS times (key TEXT PRIMARY KEY, device TEXT, source TEXT, jaxlib TEXT,"
    " seconds REAL)",
    "CREATE TABLE IF NOT EXISTS compiles (key TEXT PRIMARY KEY, device TEXT, jaxlib TEXT, result"
    " TEXT)",
    "CREATE TABLE IF NOT EXISTS tried (key TEXT PRIMARY KEY, step TEXT, device TEXT, jaxlib TEXT,"
    " actions TEXT, result TEXT)",
)


def default_path() -> pathlib.Path:
    """`$XDG_CACHE_HOME/jaxmem/profile.sqlite`, with `~/.cache` where that is unset."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(cache) / "jaxmem" / "profile.sqlite"


class Database:
    """Seconds of pieces of work on a device, and the results of deviceless compiles, which are the
    same every time.
    """

    def __init__(self, path: pathlib.Path | None = None):
        self.path = path or default_path()
        self._jaxlib = installed("jaxlib")
        self._kernels = " ".join(f"{name} {installed(name)}" for name in ("jax-triton", "triton"))

    def read_times(self, device: str, source: str, texts: Sequence[str]) -> dict[str, float]:
        """Seconds of those of `texts` that are known."""
        keys = {self._key(device, source, text): text for text in texts}
        rows = self._select("SELECT key, seconds FROM times WHERE key IN ({})", list(keys))
        return {
            keys[key]: seconds
            for key, seconds in rows
            if isinstance(seconds, float) and seconds >= 0
        }

    def write_times(self, device: str, source: str, seconds: Mapping[str, float]) -> None:
        rows = [
            (self._key(device, source, t), device, source, self._jaxlib, float(s))
            for t, s in seconds.items()
        ]
        self._insert("INSERT OR REPLACE INTO times VALUES (?, ?, ?, ?, ?)", rows)

    def read_compile(self, device: str, program: bytes) -> dict | None:
        """What a compile of `program` for `device` said, if it is known."""
        rows = self._select(
            "SELECT key, result FROM compiles WHERE key IN ({})", [self._key(device, program)]
        )
        try:
            return json.loads(rows[0][1]) if rows else None
        except (TypeError, json.JSONDecodeError):
            return None

    def write_compile(self, device: str, program: bytes, result: dict) -> None:
        row = (self._key(device, program), device, self._jaxlib, json.dumps(result))
        self._insert("INSERT OR REPLACE INTO compiles VALUES (?, ?, ?, ?)", [row])

    def read_tried(self, device: str, step: str, most: int) -> list[tuple[str, str]]:
        """Actions and results of the latest compiles of `step`, oldest first."""
        query = (
            "SELECT actions, result FROM tried WHERE step IN ({}) ORDER BY rowid DESC LIMIT"
            f" {int(most)}"
        )
        return self._select(query, [self._key(device, step)])[::-1]

    def write_tried(self, device: str, step: str, actions: str, result: str) -> None:
        key = self._key(device, step, actions)
        row = (key, self._key(device, step), device, self._jaxlib, actions, result)
        self._insert("INSERT OR REPLACE INTO tried VALUES (?, ?, ?, ?, ?, ?)", [row])

    def _key(self, *parts: str | bytes) -> str:
        digest = hashlib.sha256(f"{self._jaxlib} {self._kernels}".encode())
        for part in parts:
            digest.update(b"\0" + (part if isinstance(part, bytes) else part.encode()))
        return digest.hexdigest()

    def _select(self, query: str, keys: list[str]) -> list:
        try:
            with self._open() as connection:
                return connection.execute(query.format(", ".join("?" * len(keys))), keys).fetchall()
        except (sqlite3.Error, OSError):
            return []

    def _insert(self, query: str, rows: list[tuple]) -> None:
        try:
            with self._open() as connection:
                connection.executemany(query, rows)
        except (sqlite3.Error, OSError):
            return

    def _open(self) -> "_Session":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return _Session(self.path)


class _Session:
    """A connection that commits and closes."""

    def __init__(self, path: pathlib.Path):
        self._path = path

    def __enter__(self) -> sqlite3.Connection:
        self._connection = sqlite3.connect(self._path, timeout=5)
        try:
            for table in _TABLES:
                self._connection.execute(table)
        except sqlite3.Error:
            self._connection.close()
            raise
        return self._connection

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None:
                self._connection.commit()
        finally:
            self._connection.close()

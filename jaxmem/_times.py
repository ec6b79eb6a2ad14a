"""The database of times: SQLite, keyed by device, JAX version, source and the work's own text (Adacc §3.1, A1)."""

import hashlib
import os
import pathlib
import sqlite3
from collections.abc import Mapping, Sequence
from importlib.metadata import version

_TABLE = "CREATE TABLE IF NOT EXISTS times (key TEXT PRIMARY KEY, device TEXT, source TEXT, jaxlib TEXT, seconds REAL)"


def default_path() -> pathlib.Path:
    """`$XDG_CACHE_HOME/jaxmem/times.sqlite`, with `~/.cache` where that is unset."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(cache) / "jaxmem" / "times.sqlite"


class Times:
    """Times by the text of the work. A database that cannot be read or written costs speed, never a plan."""

    def __init__(self, path: pathlib.Path | None = None):
        self.path = path or default_path()
        self._jaxlib = version("jaxlib")

    def _key(self, device: str, source: str, text: str) -> str:
        return hashlib.sha256("\0".join((device, source, self._jaxlib, text)).encode()).hexdigest()

    def _connect(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, timeout=5)
        connection.execute(_TABLE)
        return connection

    def read(self, device: str, source: str, texts: Sequence[str]) -> dict[str, float]:
        """Seconds of those of `texts` that are known."""
        found = {}
        try:
            connection = self._connect()
            with connection:
                for text in texts:
                    row = connection.execute(
                        "SELECT seconds FROM times WHERE key = ?", (self._key(device, source, text),)
                    ).fetchone()
                    if row is not None and row[0] >= 0:
                        found[text] = float(row[0])
            connection.close()
        except (sqlite3.Error, OSError, TypeError, ValueError):
            return {}
        return found

    def write(self, device: str, source: str, seconds: Mapping[str, float]) -> None:
        rows = [(self._key(device, source, t), device, source, self._jaxlib, s) for t, s in seconds.items()]
        try:
            connection = self._connect()
            with connection:
                connection.executemany("INSERT OR REPLACE INTO times VALUES (?, ?, ?, ?, ?)", rows)
            connection.close()
        except (sqlite3.Error, OSError):
            return

"""Stores measured times and results of compiles in SQLite: times under the text of the timed work
(Adacc §3.1), results of compiles under the bytes of the program.

The database is only a cache: several processes share its file, the file heals, and it stays small.
A fault of the file costs speed and raises no error. A file that cannot be used (no permission, a
full disk, a lock that is never released) is left alone. A damaged file is moved aside, and a new
one is begun. Moving aside is for damage alone: any other error may be over at the next use, and a
new file would lose the file's rows.

The database uses SQLite's rollback journal. The alternative, a write-ahead log, needs memory that
all processes share. Network file systems lack such memory, and home folders are often on them.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import platformdirs

from jaxmem._core.progress import LOG
from jaxmem._core.versions import installed
from jaxmem._core.warn import warn

MOST_BYTES = 256 * 2**20
PATIENCE = 5.0  # seconds to wait for another process's transaction
_IMPATIENCE = 0.05  # the same wait in a process that has waited in vain before
LAYOUT = 1  # changes with the columns; files without checksums have 0
COLUMNS = {
    "key": "TEXT PRIMARY KEY",
    "device": "TEXT",
    "jaxlib": "TEXT",
    "written": "REAL",  # seconds since 1970
    "checksum": "INTEGER",  # SQLite has none, and would read flipped bits as other numbers
    "value": "TEXT",  # JSON; last, so that the other columns are read without its pages
}
TABLES = ("times", "compiles", "tried")
_COLUMNS = ", ".join(f"{column} {kind}" for column, kind in COLUMNS.items())
_STATEMENTS = {name: f"CREATE TABLE {name} ({_COLUMNS})" for name in TABLES}
_READ = "key, written, checksum, value"
_EVERY = " UNION ALL ".join(f"SELECT written FROM {name}" for name in TABLES)
# SQLite's codes for a file with other content than ours. Errors with other codes may be temporary.
_DAMAGE = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,  # no such table, no such column
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
}
# Errors of a process that has the old file open while another process moves it, and of a process
# whose journal the former deletes: both files' journals have one name. The next try has none.
_MOVED = {sqlite3.SQLITE_READONLY_DBMOVED, sqlite3.SQLITE_IOERR_DELETE_NOENT}
_TRIES = 4  # one, one after healing, and two for processes that end their work on the moved file
_SIDECARS = ("-journal", "-wal", "-shm")
# Files for which this process has reported that it cannot use them, or has moved them aside.
_gone_without: set[pathlib.Path] = set()
_healed: set[pathlib.Path] = set()


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of a piece of work.

    seconds: the least time of several runs.
    spread: the excess of the median over the least time, as a share of the least time, for most of
      the pieces that were measured together. 0 for an estimate.
    written: the time of storing, in seconds since 1970.
    """

    seconds: float
    spread: float = 0.0
    written: float = 0.0


def default_path() -> pathlib.Path:
    """`profile.sqlite` in the user's cache folder: `~/.cache/jaxmem` or `$XDG_CACHE_HOME/jaxmem` on
    Linux.
    """
    return platformdirs.user_cache_path("jaxmem", appauthor=False) / "profile.sqlite"


class Database:
    """Reads and writes times of pieces of work on a device, results of deviceless compiles, which
    are the same every time, and the compiled plans of earlier searches.

    Every key holds the versions of jaxlib and of the kernels' compilers, so that no row of another
    version is found.

    path: the file; None means `default_path()`. The file and the folders above it are made.
    since: rows that were written before this time, in seconds since 1970, are not read.
    most_bytes: the most bytes of all rows. Beyond it the oldest rows of all tables are deleted.
    """

    def __init__(
        self,
        path: pathlib.Path | None = None,
        since: float = 0.0,
        most_bytes: int = MOST_BYTES,
    ):
        self.path, self.since, self.most_bytes = path or default_path(), since, most_bytes
        self._jaxlib = installed("jaxlib")
        self._kernels = " ".join(f"{name} {installed(name)}" for name in ("jax-triton", "triton"))

    def read_times(self, device: str, source: str, texts: Sequence[str]) -> dict[str, Timing]:
        """The stored times of pieces of work: text -> time, without pieces that have no time.

        device: the device of the measurements.
        source: the method, such as "measured".
        texts: the pieces of work, each as a text that is equal for equal work.
        """
        keys = {self._key(device, source, text): text for text in texts}
        found = self._get("times", list(keys))
        return {keys[key]: timing for key, row in found if (timing := _timing(*row)) is not None}

    def write_times(self, device: str, source: str, times: Mapping[str, Timing]) -> None:
        values = {self._key(device, source, t): [x.seconds, x.spread] for t, x in times.items()}
        self._put("times", device, values)

    def read_compile(self, device: str, program: bytes) -> dict | None:
        """The stored result of a compile of `program` for `device`, or None."""
        # one row, or none
        for _, (result, _) in self._get("compiles", [self._key(device, program)]):
            return result if isinstance(result, dict) else None
        return None

    def write_compile(self, device: str, program: bytes, result: dict) -> None:
        self._put("compiles", device, {self._key(device, program): result})

    def read_tried(self, device: str, step: str, most: int) -> list[tuple[str, str]]:
        """Actions and results of the latest `most` compiles of `step`, oldest first."""
        prefix = self._key(device, step)
        rows = self.read(  # a range of keys, which the index finds; `;` is next after `:`
            f"SELECT {_READ} FROM tried WHERE key > ? AND key < ? AND written >= ?"
            " ORDER BY written DESC, rowid DESC LIMIT ?",
            (f"{prefix}:", f"{prefix};", self.since, most),
        )
        read = [v for _, (v, _) in _sound(rows) if isinstance(v, list) and len(v) == 2]
        return [(a, b) for a, b in read if isinstance(a, str) and isinstance(b, str)][::-1]

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
        """The sound rows of a table under these keys: key, value and time of writing."""
        marks = ", ".join("?" * len(keys))
        query = f"SELECT {_READ} FROM {table} WHERE key IN ({marks}) AND written >= ?"
        return _sound(self.read(query, (*keys, self.since)))

    def _put(self, table: str, device: str, values: Mapping[str, Any]) -> None:
        """Writes rows into a table, in place of rows with the same key."""
        now, texts = time.time(), {key: json.dumps(value) for key, value in values.items()}
        rows = [(k, device, self._jaxlib, now, _checksum(k, t), t) for k, t in texts.items()]
        marks = ", ".join("?" * len(COLUMNS))

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")  # this waits for others; a later lock does not
            connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)
            self._trim(connection)
            connection.execute("COMMIT")

        if rows:
            self._attempt(work)

    def read(self, query: str, parameters: Sequence = ()) -> list[tuple]:
        """The rows that `query` finds; none if the file cannot be used."""
        return self._attempt(lambda c: c.execute(query, parameters).fetchall()) or []

    def files(self) -> list[pathlib.Path]:
        """The file, the files that SQLite keeps for it, and the copy of a damaged file."""
        beside = [self._beside(suffix) for suffix in ("", *_SIDECARS, ".lock")]
        return [path for path in (*beside, *self._damaged()) if os.path.isfile(path)]

    def fault(self, pragma: str = "quick_check") -> str | None:
        """The fault of the file by SQLite's `pragma` and by its tables. None if the file is sound
        or missing.

        Raises sqlite3.Error or OSError if the file cannot be examined.
        """
        try:
            os.lstat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            with contextlib.closing(self._connect("rw")) as connection:
                said = connection.execute(f"PRAGMA {pragma}(1)").fetchone()[0]
                return said if said != "ok" else _misfit(connection)
        except (sqlite3.Error, UnicodeError, _Damaged) as error:
            if not _is_damage(error):
                raise
            return str(error)

    def _attempt(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        """The result of `work`. Heals a damaged file, and tries again. None if the file cannot be
        used.
        """
        healed = False
        for tries in reversed(range(_TRIES)):
            try:
                with contextlib.closing(self._open()) as connection:
                    return work(connection)
            except (sqlite3.Error, OSError, UnicodeError, _Damaged) as error:
                if tries and getattr(error, "sqlite_errorcode", None) in _MOVED:
                    continue
                if tries and not healed and _is_damage(error) and self._heal():
                    healed = True
                    continue
                if self.path not in _gone_without:
                    _gone_without.add(self.path)
                    LOG.info("%s cannot be used (%s); going on without it", self.path, error)
                return None

    def _open(self) -> sqlite3.Connection:
        """A connection to a file that has our tables. Raises _Damaged if it has other tables."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = self._connect("rwc")
        try:
            # SQLite does not wait for the disk. A power failure may damage the file, and the next
            # process replaces a damaged file.
            connection.execute("PRAGMA synchronous = OFF")
            if _layout(connection) < LAYOUT:
                _lay_out(connection)
            if (what := _misfit(connection)) is not None:
                raise _Damaged(what)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, mode: str) -> sqlite3.Connection:
        """A connection in SQLite's `mode`: "rw" fails if the file is missing, "rwc" makes it.

        Python begins no transactions by itself (`isolation_level`): every one is ours.
        """
        if os.path.isdir(self.path):
            raise _Damaged("it is a folder")
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        patience = _IMPATIENCE if self.path in _gone_without else PATIENCE
        connection = sqlite3.connect(uri, uri=True, timeout=patience, isolation_level=None)
        connection.text_factory = lambda text: text.decode(errors="replace")
        return connection

    def _trim(self, connection: sqlite3.Connection) -> None:
        """Deletes the oldest rows, down to three quarters of `most_bytes`, if more are used.

        The file keeps its free pages, and later rows fill them: it stops growing without a rewrite.
        """
        if _used(connection) <= self.most_bytes:
            return
        while _used(connection) > 0.75 * self.most_bytes:
            (rows,) = connection.execute(f"SELECT count(*) FROM ({_EVERY})").fetchone()
            if rows == 0:
                return
            # An eighth of the rows at a time, the oldest of all tables together.
            (limit,) = connection.execute(
                f"SELECT written FROM ({_EVERY}) ORDER BY written LIMIT 1 OFFSET {rows // 8}"
            ).fetchone()
            for name in TABLES:
                connection.execute(f"DELETE FROM {name} WHERE written <= ?", (limit,))

    def _heal(self) -> bool:
        """Moves a damaged file aside. Returns whether the path can be used now.

        If several processes meet the damage, one of them moves the file. The others wait for the
        lock, find no damage any more, and leave the new file alone. The lock is an SQLite file too:
        its lock works on every system, and ends with the process that holds it.
        """
        lock_path = self._beside(".lock")
        try:
            with contextlib.closing(
                sqlite3.connect(lock_path, timeout=PATIENCE, isolation_level=None)
            ) as lock:
                lock.execute("BEGIN EXCLUSIVE")
                what = self.fault("integrity_check")
                if what is None:
                    return True
                aside = self._move_aside()
        except (sqlite3.Error, OSError):
            return False
        if self.path not in _healed:
            _healed.add(self.path)
            warn(
                f"jaxmem: the database of times and compiles {str(self.path)!r} was damaged"
                f" ({what}). It was moved to {str(aside)!r}, and a new one is begun; only time is"
                " lost, since what it knew is measured and compiled again"
            )
        return True

    def _move_aside(self) -> pathlib.Path:
        """Renames the file, and removes the files that were moved aside before."""
        for suffix in _SIDECARS:  # first: by an old journal a new file would be rolled back
            self._beside(suffix).unlink(missing_ok=True)
        earlier = self._damaged()
        aside = self._beside(f".damaged-{time.strftime('%Y%m%d-%H%M%S')}")
        os.replace(self.path, aside)
        for path in earlier:
            if path != aside:
                with contextlib.suppress(OSError):  # a folder that somebody filled stays
                    path.rmdir() if path.is_dir() else path.unlink()
        return aside

    def _damaged(self) -> list[pathlib.Path]:
        """The copies of damaged files, the oldest first."""
        return sorted(self.path.parent.glob(f"{self.path.name}.damaged-*"))

    def _beside(self, suffix: str) -> pathlib.Path:
        """A path in the database's folder, with a suffix after its name."""
        return self.path.with_name(self.path.name + suffix)


def usage() -> tuple[int, dict[str, int]]:
    """Returns the bytes of all files of the database, and the number of rows by table. Rows are 0
    if the file is damaged or missing.
    """
    cache = Database()
    rows: dict[str, int] = dict.fromkeys(TABLES, 0)
    if os.path.isfile(cache.path) and check() is None:
        for name in TABLES:
            rows[name] = sum(found for (found,) in cache.read(f"SELECT count(*) FROM {name}"))
    return sum(map(os.path.getsize, cache.files())), rows


def counted(rows: Mapping[str, int]) -> str:
    """Numbers of rows by table, in words."""
    return ", ".join(f"{count} {table}" for table, count in rows.items())


def clear() -> int:
    """Removes the database and the copy of a damaged one; returns the bytes that this freed.

    Raises OSError if a file cannot be removed.
    """
    freed = 0
    for path in reversed(Database().files()):  # journals go before the file that they are of
        with contextlib.suppress(FileNotFoundError):  # SQLite removes its own, whenever it is done
            size = os.path.getsize(path)
            path.unlink()
            freed += size
    return freed


def check() -> str | None:
    """Returns the fault of the database by SQLite's quick check. None if the database is sound or
    missing. Changes nothing.
    """
    try:
        return Database().fault()
    except (sqlite3.Error, OSError) as error:
        return f"it cannot be read: {error}"


def _sound(rows: Iterable[tuple]) -> Iterator[tuple[str, tuple[Any, float]]]:
    """Key, value and time of each row whose checksum fits its text. Rows with flipped bits are left
    out, as if they had never been written.
    """
    for key, written, checksum, text in rows:
        right = isinstance(text, str) and isinstance(written, float)  # SQLite does not insist
        if right and checksum == _checksum(key, text):
            try:
                yield key, (json.loads(text), written)
            except ValueError:
                continue


def _checksum(key: str, text: str) -> int:
    """The checksum of a row, which shows whether the row was changed."""
    return zlib.crc32(f"{key}\0{text}".encode(errors="replace"))


def _timing(value: Any, written: float) -> Timing | None:
    """The time in a row, or None if the row's value is no time."""
    try:
        seconds, spread = (float(number) for number in value)
    except (TypeError, ValueError):
        return None
    good = math.isfinite(seconds) and seconds >= 0 and spread >= 0
    return Timing(seconds, spread, written) if good else None


class _Damaged(Exception):
    """A file that is not ours to use, for a reason that SQLite has no error for."""


def _is_damage(error: Exception) -> bool:
    """Whether an error means that the file is damaged, and not busy or out of reach."""
    code = getattr(error, "sqlite_errorcode", None)  # its lowest byte is the kind of error
    wrong = isinstance(error, (_Damaged, UnicodeError))  # SQLite's messages hold flipped names
    return wrong or (code is not None and code & 0xFF in _DAMAGE)


def _misfit(connection: sqlite3.Connection) -> str | None:
    """How a file of this or of a newer layout differs from ours; None if it does not. Older layouts
    also give None: `_lay_out` empties them.
    """
    if (found := _layout(connection)) > LAYOUT:
        return f"its layout is {found}, of a newer version; this version's is {LAYOUT}"
    there = dict(connection.execute("SELECT name, sql FROM sqlite_master"))
    for name, statement in _STATEMENTS.items() if found == LAYOUT else ():
        if there.get(name) != statement:
            return f"table {name!r} is {there.get(name)!r}; expected {statement!r}"
    return None


def _lay_out(connection: sqlite3.Connection) -> None:
    """Makes our tables anew, and empties the file of an older layout."""
    connection.execute("BEGIN IMMEDIATE")
    made = _layout(connection) >= LAYOUT  # by another process, which was first
    if not made:
        for name, statement in _STATEMENTS.items():
            connection.execute(f"DROP TABLE IF EXISTS {name}")
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {LAYOUT}")
    connection.execute("COMMIT")
    if not made:
        with contextlib.suppress(sqlite3.OperationalError):  # bytes that are not worth a wait
            connection.execute("VACUUM")


def _layout(connection: sqlite3.Connection) -> int:
    """The number of the file's layout."""
    return connection.execute("PRAGMA user_version").fetchone()[0]


def _used(connection: sqlite3.Connection) -> int:
    """Bytes of the pages that hold something."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size

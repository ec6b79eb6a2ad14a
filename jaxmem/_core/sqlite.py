"""An SQLite file that is only a cache: several processes share it, it heals, and it stays small.

Whatever is wrong with it costs speed and raises no error. A file that cannot be used (for want of
permission, a full disk, a lock that is never released) is left alone; a damaged one is moved aside,
and a new one is begun. SQLite's rollback journal is used, not its write-ahead log: that one needs
memory which all processes share. Network file systems lack it, and home folders often lie on these.
"""

import contextlib
import os
import pathlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxmem._core.progress import LOG
from jaxmem._core.warn import warn

PATIENCE = 5.0  # seconds to wait for another process's transaction
_IMPATIENCE = 0.05  # the same, once waiting was in vain
_DAMAGE = {  # what SQLite says of other content than ours; what else it says may be over tomorrow
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,  # no such table, no such column
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
}
_SIDECARS = ("-journal", "-wal", "-shm")
_gone_without: set[pathlib.Path] = set()  # files that this process cannot use, which it has said
_healed: set[pathlib.Path] = set()  # files that this process has moved aside, which it has said


class SqliteFile:
    """Tables in the file at `path`, which is made where it is not there.

    path: the file; folders above it are made too.
    tables: the columns of each table with their types; one of them is `written`, in seconds.
    layout: a number that changes with `tables`. A file of a lower one is emptied, since it can
      be filled again; one of a higher number counts as damaged.
    most_bytes: what the tables may take. The oldest rows of all go where they take more.
    """

    def __init__(
        self,
        path: pathlib.Path,
        tables: Mapping[str, Mapping[str, str]],
        layout: int,
        most_bytes: int,
    ):
        self.path, self.tables, self.layout, self.most_bytes = path, tables, layout, most_bytes

    def read(self, query: str, parameters: Sequence) -> list[tuple]:
        """The rows that `query` finds; none where the file cannot be used."""
        return self._attempt(lambda c: c.execute(query, parameters).fetchall()) or []

    def write(self, table: str, rows: Iterable[Sequence]) -> None:
        """Puts rows into `table`, over those of the same key."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")  # this waits for others; a later lock does not
            names, marks = ", ".join(self.tables[table]), ", ".join("?" * len(self.tables[table]))
            query = f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})"
            connection.executemany(query, rows)
            self._trim(connection)
            connection.execute("COMMIT")

        self._attempt(work)

    def files(self) -> list[pathlib.Path]:
        """The file, what SQLite keeps beside it, and the copy of a damaged one."""
        beside = [self._beside(suffix) for suffix in ("", *_SIDECARS, ".lock")]
        return [path for path in (*beside, *self._damaged()) if os.path.isfile(path)]

    def fault(self, pragma: str = "quick_check") -> str | None:
        """What is wrong with the file by SQLite's `pragma` and the tables' columns.

        None where it is sound, or is not there. Raises sqlite3.Error or OSError where it cannot be
        looked at.
        """
        try:
            os.lstat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            with contextlib.closing(self._connect("rw")) as connection:
                said = connection.execute(f"PRAGMA {pragma}(1)").fetchone()[0]
                return said if said != "ok" else self._misfit(connection)
        except (sqlite3.Error, UnicodeError, _Damaged) as error:
            if not _is_damage(error):
                raise
            return str(error)

    def _misfit(self, connection: sqlite3.Connection) -> str | None:
        """How a file of this layout, or of a higher one, differs from what we make; None where it
            does
        not, and for a file of a lower layout, which `_lay_out` empties.
        """
        if (found := _layout(connection)) > self.layout:
            return f"its layout is {found}, of a newer version; this version's is {self.layout}"
        for name, columns in self.tables.items() if found == self.layout else ():
            there = [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
            if there != list(columns):
                return f"table {name!r} has columns {there}; expected {list(columns)}"
        return None

    def _attempt(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        """What `work` returns; None where the file cannot be used, once a damaged one is healed."""
        tries = 2
        while True:
            tries -= 1
            try:
                with contextlib.closing(self._open()) as connection:
                    return work(connection)
            except (sqlite3.Error, OSError, UnicodeError, _Damaged) as error:
                if tries and _is_damage(error) and self._heal():
                    continue
                if self.path not in _gone_without:
                    _gone_without.add(self.path)
                    LOG.info("%s cannot be used (%s); going on without it", self.path, error)
                return None

    def _open(self) -> sqlite3.Connection:
        """A connection to a file that has our tables. Raises _Damaged where it has others."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = self._connect("rwc")
        try:
            # Waiting for the disk would guard against power failures alone, after which it heals.
            connection.execute("PRAGMA synchronous = OFF")
            if _layout(connection) < self.layout:
                self._lay_out(connection)
            if (what := self._misfit(connection)) is not None:
                raise _Damaged(what)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, mode: str) -> sqlite3.Connection:
        """A connection in SQLite's `mode`: "rw" fails where there is no file, "rwc" makes one.

        Python begins no transactions by itself (`isolation_level`): every one is ours.
        """
        if os.path.isdir(self.path):
            raise _Damaged("it is a folder")
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        patience = _IMPATIENCE if self.path in _gone_without else PATIENCE
        connection = sqlite3.connect(uri, uri=True, timeout=patience, isolation_level=None)
        connection.text_factory = lambda text: text.decode(errors="replace")
        return connection

    def _lay_out(self, connection: sqlite3.Connection) -> None:
        """Makes our tables anew, and empties the file of an older layout."""
        connection.execute("BEGIN IMMEDIATE")
        made = _layout(connection) >= self.layout  # by another process, which was first
        if not made:
            for name, columns in self.tables.items():
                connection.execute(f"DROP TABLE IF EXISTS {name}")
                shape = ", ".join(f"{column} {kind}" for column, kind in columns.items())
                connection.execute(f"CREATE TABLE {name} ({shape})")
            connection.execute(f"PRAGMA user_version = {self.layout}")
        connection.execute("COMMIT")
        if not made:
            with contextlib.suppress(sqlite3.OperationalError):  # bytes that are not worth a wait
                connection.execute("VACUUM")

    def _trim(self, connection: sqlite3.Connection) -> None:
        """Drops the oldest rows, down to three quarters of `most_bytes`, where more are used.

        The file keeps its free pages, and later rows fill them: it stops growing without a rewrite.
        """
        if _used(connection) <= self.most_bytes:
            return
        every = " UNION ALL ".join(f"SELECT written FROM {name}" for name in self.tables)
        while _used(connection) > 0.75 * self.most_bytes:
            (rows,) = connection.execute(f"SELECT count(*) FROM ({every})").fetchone()
            if rows == 0:
                return
            # An eighth of the rows at a time, the oldest of all tables together.
            (limit,) = connection.execute(
                f"SELECT written FROM ({every}) ORDER BY written LIMIT 1 OFFSET {rows // 8}"
            ).fetchone()
            for name in self.tables:
                connection.execute(f"DELETE FROM {name} WHERE written <= ?", (limit,))

    def _heal(self) -> bool:
        """Moves a damaged file aside; returns whether the place is good now.

        Of several processes that meet the damage one moves the file. The others wait for its lock,
        find no damage any more, and leave the new file alone. The lock is an SQLite file too: that
        works on every system, and ends with the process that holds it.
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
        """Gives the file another name, and removes what was moved aside before."""
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
        return sorted(self.path.parent.glob(f"{self.path.name}.damaged-*"))

    def _beside(self, suffix: str) -> pathlib.Path:
        return self.path.with_name(self.path.name + suffix)


class _Damaged(Exception):
    """A file that is not ours to use, in a way that SQLite has no error for."""


def _is_damage(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", None)  # its lowest byte is the kind of error
    wrong = isinstance(error, (_Damaged, UnicodeError))  # SQLite's messages hold flipped names
    return wrong or (code is not None and code & 0xFF in _DAMAGE)


def _layout(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def _used(connection: sqlite3.Connection) -> int:
    """Bytes of the pages that hold something."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size

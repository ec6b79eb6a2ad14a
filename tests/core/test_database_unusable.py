"""A database that cannot be used is gone without: nothing is raised, no warning is given, and the
log says so once.
"""

import contextlib
import logging
import os
import pathlib
import resource
import shutil
import sqlite3
import tempfile
import time

import pytest

from jaxmem._core import database
from jaxmem._core.database import Database, Timing

TIMES = {"known": Timing(1.0)}
NOBODY = 65534


@pytest.fixture
def folder():
    """A folder that a user without rights can reach, which pytest's own is not."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="jaxmem-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def path(folder) -> pathlib.Path:
    path = folder / "cache" / "profile.sqlite"
    Database(path).write_times("gpu", "measured", TIMES)
    return path


@contextlib.contextmanager
def without_rights():
    """Permissions do not bind the superuser, as whom tests may run."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def use(path: pathlib.Path) -> dict[str, float]:
    """What is known afterwards of an old and of a new time."""
    known = Database(path)
    for i in range(3):
        known.write_times("gpu", "measured", {"new": Timing(2.0)})
        known.write_compile("gpu", b"program %d" % i, {"bytes": i})
    found = known.read_times("gpu", "measured", ["known", "new"])
    return {text: timing.seconds for text, timing in found.items()}


@pytest.fixture
def said(caplog):
    """The log's lines about databases."""
    caplog.set_level(logging.INFO, logger="jaxmem")
    return lambda: [r.getMessage() for r in caplog.records if "going on without" in r.getMessage()]


RIGHTS = {  # of the file and of its folder; what is known afterwards; what the log has
    "a file that is not to be written": (0o444, 0o755, {"known": 1.0}, "readonly"),
    "a folder that is not to be written": (0o444, 0o555, {"known": 1.0}, "profile.sqlite"),
    "a file that is not to be read": (0o000, 0o755, {}, "unable to open"),
}


@pytest.mark.parametrize(("of_file", "of_folder", "known", "text"), RIGHTS.values(), ids=RIGHTS)
def test_without_rights_what_can_be_read_is_read(path, said, of_file, of_folder, known, text):
    path.chmod(of_file)
    path.parent.chmod(of_folder)
    with without_rights():
        assert use(path) == known
    (line,) = said()
    assert text in line


def test_a_folder_that_cannot_be_entered(path, said, monkeypatch):
    path.parent.chmod(0o000)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: path.parent)
    with without_rights():
        assert use(path) == {}
        assert "cannot be read" in str(database.check())
        assert database.usage()[1] == {"times": 0, "compiles": 0, "tried": 0}
    assert len(said()) == 1


def test_a_file_in_the_place_of_the_folder(folder, said):
    (folder / "cache").write_text("mine")
    assert use(folder / "cache" / "profile.sqlite") == {}
    assert len(said()) == 1
    assert (folder / "cache").read_text() == "mine"


def test_a_damaged_file_that_cannot_be_moved(path, said):
    path.write_text("no database" * 1000)
    path.parent.chmod(0o555)
    with without_rights():
        assert use(path) == {}
    assert len(said()) == 1
    assert path.read_text() == "no database" * 1000


def test_a_full_disk(path, said):
    """A limit of the process on sizes of files, which SQLite meets as a disk that takes no more."""
    big = {"text": "x" * 2**20}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, hard))
    try:
        Database(path).write_compile("gpu", b"program", big)
        assert Database(path).read_compile("gpu", b"program") is None
        assert use(path)["known"] == 1.0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(said()) == 1
    Database(path).write_compile("gpu", b"program", big)
    assert Database(path).read_compile("gpu", b"program") == big


def test_a_lock_that_is_never_released_is_waited_for_once(path, said, monkeypatch):
    monkeypatch.setattr("jaxmem._core.database.PATIENCE", 0.5)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        start = time.monotonic()
        assert use(path) == {}
        assert 0.5 <= time.monotonic() - start < 2.0
        other.execute("ROLLBACK")
    assert said() == [f"{path} cannot be used (database is locked); going on without it"]
    assert use(path) == {"known": 1.0, "new": 2.0}


def test_a_reader_does_not_keep_a_writer_from_writing(path, said):
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        rows = other.execute("SELECT * FROM times")
        rows.fetchall()
        other.execute("COMMIT")
        assert use(path) == {"known": 1.0, "new": 2.0}
    assert said() == []

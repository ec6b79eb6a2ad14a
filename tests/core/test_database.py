"""What is remembered is what was written, or nothing: whatever happens to the file or beside it."""

import contextlib
import json
import pathlib
import random
import sqlite3
import subprocess
import sys
import time
import zlib

import pytest

from jaxmem._core import database
from jaxmem._core.database import Database, Timing
from jaxmem.errors import JaxmemWarning

ROOT = pathlib.Path(__file__).parents[2]
TIMES = {f"piece {i}": Timing(1e-6 * (i + 1), 0.01 * i) for i in range(300)}
RESULT = {"argument_bytes": 12, "temp_bytes": 34}
WRITER = """
import pathlib, sys
from jaxmem._core.database import Database, Timing
from jaxmem.errors import JaxmemWarning
path, name = pathlib.Path(sys.argv[1]), sys.argv[2]
for i in range(25):
    known = Database(path)
    known.write_times("gpu", "measured", {f"{name} {i}": Timing(float(i))})
    assert known.read_times("gpu", "measured", [f"{name} {i}"])[f"{name} {i}"].seconds == i
"""


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    return tmp_path / "a folder" / "profile.sqlite"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    """The default place, in a folder of this test's own, with something in it."""
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: tmp_path / "cache")
    fill(database.default_path())
    return database.default_path()


def fill(path: pathlib.Path) -> None:
    Database(path).write_times("gpu", "measured", TIMES)
    Database(path).write_compile("gpu", b"program", RESULT)
    Database(path).write_tried("gpu", "step", "keep", "1")


def seconds(path: pathlib.Path, **how) -> dict[str, float]:
    found = Database(path, **how).read_times("gpu", "measured", list(TIMES))
    return {text: timing.seconds for text, timing in found.items()}


def is_whole(path: pathlib.Path) -> bool:
    """Whether every time that `fill` writes is read."""
    return seconds(path) == {text: timing.seconds for text, timing in TIMES.items()}


def rows(path: pathlib.Path, statement: str, *values) -> list[tuple]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(statement, values).fetchall()


def written(table: str, path: pathlib.Path) -> list[float]:
    return [row[0] for row in rows(path, f"SELECT written FROM {table}")]


def test_what_was_written_is_read(path):
    before = time.time()
    fill(path)
    known = Database(path)
    found = known.read_times("gpu", "measured", ["piece 1", "unknown", "piece 7"])
    assert {t: (x.seconds, x.spread) for t, x in found.items()} == {
        t: (TIMES[t].seconds, TIMES[t].spread) for t in ("piece 1", "piece 7")
    }
    assert all(before <= x.written <= time.time() for x in found.values())
    assert known.read_times("gpu", "xla", ["piece 1"]) == {}
    assert known.read_times("cpu", "measured", ["piece 1"]) == {}
    assert known.read_times("gpu", "measured", []) == {}
    assert known.read_compile("gpu", b"program") == RESULT
    assert known.read_compile("gpu", b"another") is None
    known.write_compile("gpu", b"program", RESULT | {"temp_bytes": 35})
    assert known.read_compile("gpu", b"program") == RESULT | {"temp_bytes": 35}


def test_the_latest_tried_plans_come_last(path, monkeypatch):
    for i in range(5):
        monkeypatch.setattr(time, "time", lambda i=i: 100.0 + i // 2)
        Database(path).write_tried("gpu", "step", f"actions {i}", str(i))
    Database(path).write_tried("gpu", "another step", "actions", "9")
    Database(path).write_tried("gpu", "step", "actions 1", "again")
    found = Database(path).read_tried("gpu", "step", 3)
    assert found == [("actions 3", "3"), ("actions 4", "4"), ("actions 1", "again")]
    assert len(Database(path).read_tried("gpu", "step", 99)) == 5
    assert Database(path).read_tried("cpu", "step", 3) == []


def test_what_is_older_is_not_read_where_that_is_asked_for(path):
    fill(path)
    known = Database(path, since=time.time())
    assert known.read_times("gpu", "measured", ["piece 1"]) == {}
    assert known.read_compile("gpu", b"program") is None
    assert known.read_tried("gpu", "step", 9) == []
    known.write_times("gpu", "measured", {"piece 1": Timing(7.0)})
    assert known.read_times("gpu", "measured", ["piece 1"])["piece 1"].seconds == 7.0
    assert seconds(path)["piece 2"] == TIMES["piece 2"].seconds


def test_the_oldest_rows_go_first(path, monkeypatch):
    known = Database(path, most_bytes=2**20)
    result = {"text": "x" * 2000}
    for i in range(1200):
        monkeypatch.setattr(time, "time", lambda i=i: float(i))
        known.write_compile("gpu", b"%d" % i, result)
        if i % 10 == 0:
            known.write_times("gpu", "measured", {str(i): Timing(1.0)})
        assert path.stat().st_size <= 2**20 + 2**14
    oldest = min(written("compiles", path))
    assert oldest > 600
    assert written("compiles", path) == list(range(int(oldest), 1200))
    assert written("times", path) == [t for t in range(0, 1200, 10) if t >= oldest]
    assert known.read_compile("gpu", b"1199") == result
    assert known.read_compile("gpu", b"0") is None


def test_a_row_that_is_larger_than_the_bound_does_no_harm(path):
    known = Database(path, most_bytes=2**16)
    known.write_compile("gpu", b"program", {"text": "x" * 2**20})
    known.write_compile("gpu", b"small", RESULT)
    assert known.read_compile("gpu", b"small") == RESULT
    assert Database(path).fault() is None


def test_a_file_of_an_earlier_version_is_renewed_in_silence(path):
    path.parent.mkdir()
    rows(path, "CREATE TABLE times (key TEXT PRIMARY KEY, device TEXT, seconds REAL)")
    rows(path, "INSERT INTO times VALUES ('k', ?, 1.0)", "x" * 2**20)
    fill(path)
    assert is_whole(path)
    assert path.stat().st_size < 2**18
    assert [p.name for p in path.parent.iterdir()] == ["profile.sqlite"]


@pytest.mark.parametrize("content", [b"", b"x"])
def test_a_file_without_content_is_as_good_as_none(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    fill(path)
    assert len(seconds(path)) == len(TIMES)


def overwrite(path: pathlib.Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def folder(path: pathlib.Path, *files: str) -> None:
    path.unlink()
    path.mkdir()
    for name in files:
        (path / name).write_text("mine")


def view(path: pathlib.Path) -> None:
    rows(path, "DROP TABLE times")
    rows(path, "CREATE VIEW times AS SELECT 1 AS key")


DAMAGE = {
    "text": lambda p: p.write_text("no database\n" * 1000),
    "a header alone": lambda p: overwrite(p, 16, b"\0" * 4000),
    "cut within a page": lambda p: p.write_bytes(p.read_bytes()[:5000]),
    "cut between pages": lambda p: p.write_bytes(p.read_bytes()[: 3 * 4096]),
    "pages of zeros": lambda p: overwrite(p, 4096, b"\0" * 5 * 4096),
    "a folder": folder,
    "a folder with a file": lambda p: folder(p, "note"),
    "a newer version": lambda p: rows(p, "PRAGMA user_version = 99"),
    "a table less": lambda p: rows(p, "DROP TABLE times"),
    "another column": lambda p: rows(p, "ALTER TABLE times RENAME COLUMN value TO seconds"),
    "a column more": lambda p: rows(p, "ALTER TABLE times ADD COLUMN more TEXT"),
    "a view": view,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_moved_aside_and_a_new_one_begun(cache, damage):
    DAMAGE[damage](cache)
    content = None if cache.is_dir() else cache.read_bytes()
    assert database.check() is not None
    with pytest.warns(JaxmemWarning, match="was damaged") as warned:
        fill(cache)
    assert [str(cache) in str(w.message) for w in warned] == [True]
    assert database.check() is None
    assert is_whole(cache)
    (aside,) = cache.parent.glob("profile.sqlite.damaged-*")
    assert str(aside) in str(warned[0].message)
    assert content is None or aside.read_bytes() == content


def test_a_journal_of_a_damaged_file_does_not_reach_the_new_one(cache):
    cache.write_text("no database" * 1000)
    for suffix in ("-journal", "-wal", "-shm"):
        cache.with_name(cache.name + suffix).write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" * 100)
    with pytest.warns(JaxmemWarning, match="was damaged"):
        fill(cache)
    assert len(seconds(cache)) == len(TIMES)
    assert database.check() is None
    assert not cache.with_name(cache.name + "-wal").exists()


@pytest.mark.filterwarnings("ignore:jaxmem.*was damaged")
@pytest.mark.parametrize("seed", range(20))
def test_flipped_bits_never_become_another_value(path, seed):
    fill(path)
    content, draw = bytearray(path.read_bytes()), random.Random(seed)
    for _ in range(draw.choice((1, 10, 1000))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    known = Database(path)
    for text, found in known.read_times("gpu", "measured", list(TIMES)).items():
        assert (found.seconds, found.spread) == (TIMES[text].seconds, TIMES[text].spread)
    assert known.read_compile("gpu", b"program") in (RESULT, None)
    assert known.read_tried("gpu", "step", 9) in ([("keep", "1")], [])
    for _ in range(2):  # the last row of the first may be the one that meets the damage
        fill(path)
    assert known.read_compile("gpu", b"program") == RESULT


WRONG = ("", "{", "[1.0", "null", "[]", '["a", 1]', "[-1.0, 0.0]", "[NaN, 0.0]", "[1.0]", None, 3)


@pytest.mark.parametrize("value", WRONG)
def test_a_row_that_does_not_say_what_was_written_is_left_out(path, value):
    fill(path)
    wanted = {"times": json.dumps([TIMES["piece 3"].seconds, TIMES["piece 3"].spread])}
    wanted["compiles"] = json.dumps(RESULT)
    for right_sum in (False, True):
        for table, old in wanted.items():
            (key,) = rows(path, f"SELECT key FROM {table} WHERE value = '{old}'")[0]
            total = zlib.crc32(f"{key}\0{value}".encode()) if right_sum else 0
            new = f"UPDATE {table} SET value = ?, checksum = {total} WHERE key = '{key}'"
            rows(path, new, value)
        found = seconds(path)
        assert len(found) == len(TIMES) - 1
        assert "piece 3" not in found
        assert Database(path).read_compile("gpu", b"program") is None
        assert Database(path).read_tried("gpu", "step", 9) == [("keep", "1")]
        fill(path)
        assert len(seconds(path)) == len(TIMES)


def test_text_that_is_no_utf8_is_left_out(path):
    fill(path)
    rows(path, "UPDATE times SET value = CAST(x'ff5b' AS TEXT) WHERE rowid = 4")
    assert len(seconds(path)) == len(TIMES) - 1


def processes(path: pathlib.Path, many: int, *flags: str) -> list[str]:
    """The errors' text of `many` writers at once."""
    line, how = [sys.executable, *flags, "-c", WRITER, str(path)], {"stderr": subprocess.PIPE}
    running = [subprocess.Popen([*line, str(i)], cwd=ROOT, text=True, **how) for i in range(many)]
    said = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0] * many, said
    texts = [f"{name} {i}" for name in range(many) for i in range(25)]
    assert len(Database(path).read_times("gpu", "measured", texts)) == 25 * many
    return said


def test_processes_write_at_once(path):
    assert processes(path, 4, "-W", "error") == [""] * 4
    assert [p.name for p in path.parent.iterdir()] == ["profile.sqlite"]


def test_processes_heal_a_file_once(path):
    fill(path)
    overwrite(path, 4096, b"\xff" * 5 * 4096)
    said = processes(path, 4)
    assert sum("was damaged" in text for text in said) == 1
    assert len(list(path.parent.glob("*.damaged-*"))) == 1


def assert_writes(path):
    known = Database(path)
    known.write_times("gpu", "measured", {"work": Timing(2.0)})
    assert known.read_times("gpu", "measured", ["work"])["work"].seconds == 2.0


def test_a_write_into_a_file_that_is_moved_meanwhile_is_tried_again(path, monkeypatch):
    """The file is open, and before the write begins, another process moves it aside."""
    fill(path)
    original = Database._open

    def moved_meanwhile(self):
        connection = original(self)
        if not list(path.parent.glob("moved")):
            path.rename(path.parent / "moved")
        return connection

    monkeypatch.setattr(Database, "_open", moved_meanwhile)
    assert_writes(path)


def test_a_write_whose_journal_another_process_deletes_is_tried_again(path, monkeypatch):
    """A process that ends its work on a moved file deletes the new file's journal."""
    original = Database._connect
    journal = path.with_name(path.name + "-journal")
    deleted = []

    def delete_once(statement: str):
        if statement == "COMMIT" and not deleted:
            journal.unlink()  # fails if the transaction has none
            deleted.append(journal)

    def traced(self, mode):
        connection = original(self, mode)
        connection.set_trace_callback(delete_once)
        return connection

    monkeypatch.setattr(Database, "_connect", traced)
    assert_writes(path)
    assert deleted


def test_a_file_that_another_process_healed_is_left_alone(path, monkeypatch):
    """The damage is met, and before the lock is had, somebody else has moved the file."""
    fill(path)
    original = Database.fault
    healthy = path.read_bytes()
    path.write_text("no database" * 1000)

    def healed_meanwhile(self, pragma="quick_check"):
        path.write_bytes(healthy)
        return original(self, pragma)

    monkeypatch.setattr(Database, "fault", healed_meanwhile)
    assert len(seconds(path)) == len(TIMES)
    assert not list(path.parent.glob("*.damaged-*"))


def test_usage_and_clear(cache):
    size, rows = database.usage()
    assert size == cache.stat().st_size
    assert rows == {"times": len(TIMES), "compiles": 1, "tried": 1}
    beside = cache.with_name("notes.txt")
    beside.write_text("mine")
    cache.with_name(cache.name + ".damaged-20260101-000000").write_bytes(b"x" * 100)
    assert database.usage()[0] == size + 100
    for name in ("-wal", "-shm", "-journal"):
        cache.with_name(cache.name + name).write_bytes(b"x" * 100)
    assert database.clear() == size + 400
    assert [p.name for p in cache.parent.iterdir()] == ["notes.txt"]
    assert database.clear() == 0
    assert database.usage() == (0, dict.fromkeys(rows, 0))
    assert database.check() is None
    fill(cache)
    assert database.usage()[1] == rows


def test_the_default_place_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert database.default_path() == tmp_path / "jaxmem" / "profile.sqlite"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    expected = pathlib.Path("/home/somebody/.cache/jaxmem/profile.sqlite")
    assert database.default_path() == expected

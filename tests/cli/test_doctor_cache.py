"""The doctor's look at the database: what it finds, and that it changes nothing."""

import os

import pytest

from jaxmem._cli.doctor import cache
from jaxmem._core.bytes import show_bytes
from jaxmem._core.database import Database, Timing, default_path


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return default_path()


def test_no_database_yet(place):
    assert (cache().level, cache().found) == ("ok", f"{place}, not yet made")
    assert not place.parent.exists()


def test_a_good_one(place):
    Database().write_times("gpu", "measured", {"a": Timing(1.0), "b": Timing(2.0)})
    assert cache().level == "ok"
    size = show_bytes(place.stat().st_size)
    assert cache().found == f"{place}, {size}: 2 times, 0 compiles, 0 tried"


def test_a_damaged_one(place):
    place.parent.mkdir()
    place.write_text("no database" * 1000)
    assert cache().level == "note"
    assert cache().found == f"{place}: file is not a database"
    assert "moves it aside" in str(cache().remedy)
    assert place.read_text() == "no database" * 1000


@pytest.mark.parametrize("made", [False, True])
def test_one_that_cannot_be_written(place, monkeypatch, made):
    if made:
        Database().write_times("gpu", "measured", {"a": Timing(1.0)})
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cache().level == "note"
    assert cache().found.startswith(f"{place} cannot be written")
    assert "XDG_CACHE_HOME" in str(cache().remedy)

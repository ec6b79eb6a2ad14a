"""`jaxmem doctor` knows what goes together, and what does not. Its look at the database changes
nothing.
"""

import json
import os

import jax
import pytest

from jaxmem._cli.doctor import absent, cache, combinations, settings
from jaxmem._core.bytes import show_bytes
from jaxmem._core.database import Database, Timing, default_path
from jaxmem._target.deviceless import wheels
from tests.shared.command import run
from tests.shared.remat3 import options


def test_every_check_has_a_level(capsys):
    assert run("doctor --json") in (0, 1)
    assert {c["level"] for c in json.loads(capsys.readouterr().out)} <= {"ok", "note", "bad"}


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"jax": "0.10.2", "jaxlib": "0.10.2"}, "wrong offsets"),
        ({"jax": "0.11.2", "jaxlib": "0.11.2", "flax": "0.12.8"}, "flax 0.12.8 does not import"),
        ({"jax": "0.11.2", "jaxlib": "0.11.2", "triton": "3.9.0"}, "PTX"),
        ({"jax": "0.10.2", "jaxlib": "0.10.2", "jax-triton": "0.4.0"}, "needs jax 0.11"),
        ({"jax": "0.11.2", "jaxlib": "0.10.2"}, "with jaxlib 0.10.2"),
    ],
)
def test_the_doctor_knows_what_does_not_go_together(versions, said):
    checks = combinations(versions)
    assert any(said in c.found and c.remedy for c in checks)


def test_the_doctor_tells_which_devices_can_be_compiled_for(monkeypatch):
    there = {"jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda13-plugin": "0.11.2"}
    there |= {"jax-cuda13-pjrt": "0.11.2", "libtpu": "0.0.48.1"}
    monkeypatch.setattr(wheels, "installed", there.get)
    monkeypatch.setattr(wheels.metadata, "requires", lambda _: ['libtpu==0.0.48.*; extra == "tpu"'])
    assert [(c.name, c.level) for c in absent()] == [
        ("plans for GPUs that are not there", "ok"),
        ("plans for TPUs that are not there", "ok"),
    ]
    there["libtpu"] = "0.0.42.1"
    gpus, tpus = absent()
    assert gpus.level == "ok"
    assert tpus.level == "note", "another jax's libtpu"
    assert tpus.remedy == "pip install --no-deps 'libtpu==0.0.48.*'"
    del there["jax-cuda13-pjrt"], there["libtpu"]
    assert [c.level for c in absent()] == ["note", "note"]
    assert "jax-cuda13-pjrt==0.11.2" in absent()[0].remedy


def test_the_doctor_knows_flags_under_which_jaxmem_never_offloads():
    flag = "--xla_gpu_enable_pipelined_host_offloading"
    (check,) = settings({"XLA_FLAGS": flag}, gpu=False)
    assert (check.level, check.found) == ("note", flag)
    assert f"{flag}=false" in check.remedy


def test_the_doctor_is_content_with_what_goes_together():
    assert [
        c.level for c in combinations({"jax": "0.11.2", "jaxlib": "0.11.2", "flax": "0.12.12"})
    ] == ["ok"]
    assert [c.level for c in settings({}, gpu=False)] == ["ok"]
    assert [c.level for c in settings({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}, gpu=True)] == [
        "ok"
    ]
    assert {c.level for c in settings({}, gpu=True)} == {"note"}
    assert {c.level for c in settings({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, gpu=True)} == {
        "note"
    }


def test_the_next_checkpoint_is_refused_before_jax_0_12(capsys):
    with options("jax_remat3"):
        run("doctor --json")
    levels = [c["level"] for c in json.loads(capsys.readouterr().out) if c["name"] == "jax_remat3"]
    assert levels == (["bad"] if jax.__version_info__ < (0, 12) else [])


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

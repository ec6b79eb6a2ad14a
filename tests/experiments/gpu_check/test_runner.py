"""The GPU check's runner: it goes on after a kill, what failed does not stop the rest, machines are
not mixed.
"""

import dataclasses
import json
import subprocess
import sys
import time

import pytest

from experiments.errors import InputError
from experiments.gpu_check.results import Results
from experiments.gpu_check.runner import run_part
from experiments.gpu_check.settings import Settings
from tests.shared.children import alive

pytestmark = pytest.mark.usefixtures("child_paths")

PART = """
import os, pathlib, time

def points(settings):
    return os.environ.get("POINTS", "one raises dies hangs last").split()

def measure(point, settings, rows):
    mark = pathlib.Path(settings.out).with_name("calls")
    with mark.open("a") as file:
        file.write(f"{point} {os.getpid()}\\n")
    if point == "raises":
        raise ValueError("this point cannot be measured")
    if point == "dies":
        os.kill(os.getpid(), 9)
    if point == "hangs" and (mark.parent / "hang").exists():
        time.sleep(600)
    return {"value": float("nan"), "before": len(rows)}

def summary(rows, settings):
    return {"measured": len(rows)}
"""


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "a_part.py").write_text(PART)
    out, cache = str(tmp_path / "out" / "a.json"), str(tmp_path / "cache")
    yield Settings("a", "a_part", out, cache, 120.0, small=True)
    sys.modules.pop("a_part", None)


def calls(settings: Settings, column: int = 0) -> list[str]:
    """The points that were begun, or (1) their processes."""
    lines = settings.path.with_name("calls").read_text().splitlines()
    return [line.split()[column] for line in lines]


def eventually(happened, seconds: int = 60) -> None:
    for _ in range(10 * seconds):
        if happened():
            return
        time.sleep(0.1)
    raise AssertionError("it has not happened")


def test_a_failing_point_is_recorded_and_the_rest_goes_on(settings):
    data = run_part(settings).data
    assert data == json.loads(settings.path.read_text())
    rows = data["rows"]
    assert list(rows) == ["one", "raises", "dies", "hangs", "last"]
    assert rows["raises"]["error"] == "ValueError: this point cannot be measured"
    assert "exit code -9" in rows["dies"]["error"]
    assert (rows["one"]["value"], rows["last"]["before"]) == ("nan", 4)
    assert data["failed"] == ["raises", "dies"]
    assert (data["unfinished"], data["problem"], data["running"]) == ([], None, None)
    assert data["summary"] == {"measured": 3}
    assert data["device"] == "cpu"
    assert data["versions"].keys() >= {"python", "jax", "jaxlib"}
    assert data["command"] == "python -m experiments.gpu_check --out DIR --part a --small"
    assert len(set(calls(settings, 1))) == 3  # a fresh process after each failure
    before = settings.path.read_text()
    assert json.loads(before)["rows"] == run_part(settings).rows
    assert len(calls(settings)) == 5  # what is there is not measured again
    run_part(settings, retry=True)
    assert calls(settings)[5:] == ["raises", "dies"]


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_where_it_stopped(settings, tmp_path):
    settings.path.parent.mkdir()
    hang = settings.path.with_name("hang")
    hang.touch()
    code = (
        "import sys; from experiments.gpu_check.runner import run_part, Settings;"
        " run_part(Settings.read(sys.argv[1]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, settings.text()])
    try:
        eventually(lambda: settings.path.exists() and Results(settings.path).running == "hangs")
    finally:
        process.kill()
        process.wait()
    child = int(calls(settings, 1)[-1])
    eventually(lambda: not alive(child), 10)  # the device is free for the next run
    done = calls(settings)
    assert done == ["one", "raises", "dies", "hangs"]
    hang.unlink()
    data = run_part(settings).data
    assert calls(settings)[len(done) :] == ["hangs", "last"]
    assert list(data["rows"]) == ["one", "raises", "dies", "hangs", "last"]
    assert data["failed"] == ["raises", "dies"]


@pytest.mark.slow
def test_a_point_that_outlasts_the_limit_is_cut_and_given_up_after_a_second_try(
    settings, monkeypatch
):
    monkeypatch.setenv("POINTS", "hangs last")
    settings.path.parent.mkdir()
    settings.path.with_name("hang").touch()
    brief = dataclasses.replace(settings, seconds=8.0)
    cuts = lambda: Results(settings.path).data.get("cuts", {}).get("hangs", 0)
    for tries in (1, 2):
        while cuts() < tries:  # a slow machine may not get so far
            data = run_part(brief, grace=0.0).data
        assert data["running"] is None
        assert ("hangs" in data["rows"]) == (tries == 2)
    assert "given up after 2 tries: it went on for more than 8 s" in data["rows"]["hangs"]["error"]
    assert (data["failed"], data["unfinished"]) == (["hangs"], ["last"])
    assert calls(settings) == ["hangs", "hangs"]


def test_results_of_another_machine_are_not_mixed(settings):
    results = Results(settings.path)
    results.describe({"small": False, "versions": {"jax": "0"}, "device": "H200"})
    results.begin("one")
    results.add("one", {"value": 1})
    data = run_part(settings).data
    message = "--out: a.json holds results with small False, and this is True; name another folder"
    assert message in data["problem"]
    assert list(data["rows"]) == ["one"]
    settings.path.write_text("{")
    with pytest.raises(InputError, match=r"a\.json is no file of results"):
        run_part(settings)

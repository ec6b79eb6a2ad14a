"""Results name the sources that they depend on, and results whose sources changed are listed."""

import json
import pathlib
import subprocess

import pytest

from benchmarks.shared.results import Report
from benchmarks.shared.sources import Sources
from benchmarks.shared.stale import NO_HISTORY, NO_SCRIPT, listed, stale_results, written_by

FILES = {
    "benchmarks/fast.py": "import jaxmem\nfrom benchmarks.shared import timing\njaxmem.plan()\n",
    "benchmarks/shared/timing.py": "",
    "benchmarks/other.py": 'RUN = "-m", "experiments.train"\n',
    "experiments/train.py": "def main():\n    from jaxmem._train import loop\n",
    "jaxmem/__init__.py": "from jaxmem import _public",
    "jaxmem/_public.py": "from jaxmem._planner.plan import plan as plan\n",
    "jaxmem/_planner/plan.py": "",
    "jaxmem/_train/loop.py": "",
}


def git(root: pathlib.Path, *arguments: str) -> None:
    named = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(root), *named, *arguments], check=True, capture_output=True)


def commit(root: pathlib.Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-m", "files")


def write(root: pathlib.Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, encoding="utf-8")


def write_result(root: pathlib.Path, name: str, recorded: bool = True, **more) -> None:
    about = Sources(root).record(f"benchmarks/{name}.py") if recorded else {}
    found = {"command": f"python -m benchmarks.{name}", **about, **more, "results": {}}
    write(root, f"benchmarks/results/{name}.json", json.dumps(found))


@pytest.fixture
def root(tmp_path) -> pathlib.Path:
    """A small repository, whose files are committed."""
    for path, text in FILES.items():
        write(tmp_path, path, text)
    git(tmp_path, "init")
    commit(tmp_path)
    return tmp_path


def names(root: pathlib.Path) -> dict[str, list[str]]:
    return {one.name: one.changed for one in stale_results(root)}


def test_rooms_are_those_that_a_script_imports(root):
    shared = "benchmarks/shared"
    assert Sources(root).rooms("benchmarks/fast.py") == [
        "benchmarks/fast.py", shared, "jaxmem/_planner",
    ]  # fmt: skip
    assert Sources(root).rooms("benchmarks/other.py") == [
        "benchmarks/other.py", "experiments/train.py", "jaxmem/_train",
    ]  # fmt: skip


def test_a_changed_source_makes_a_result_stale(root):
    write_result(root, "fast")
    assert names(root) == {}
    write(root, "jaxmem/_planner/plan.py", "changed = True\n")
    assert names(root) == {"fast": ["jaxmem/_planner"]}


def test_a_changed_room_that_is_not_imported_makes_no_result_stale(root):
    write_result(root, "fast")
    write(root, "jaxmem/_train/loop.py", "changed = True\n")
    write(root, "benchmarks/other.py", "changed = True\n")
    assert names(root) == {}


def test_results_without_recorded_sources_are_compared_by_git(root):
    write_result(root, "fast", recorded=False)
    commit(root)
    assert names(root) == {}
    write(root, "jaxmem/_train/loop.py", "changed = True\n")
    commit(root)
    assert names(root) == {}
    write(root, "benchmarks/shared/timing.py", "changed = True\n")
    assert names(root) == {"fast": ["benchmarks/shared"]}


def test_a_result_is_of_the_script_whose_table_has_its_name(root):
    table = 'RESULTS = {"renamed": Benchmark()}\n'
    write(root, "benchmarks/both.py", f"from jaxmem._train import loop\n{table}")
    write_result(root, "renamed", recorded=False)
    write_result(root, "gone", recorded=False)
    commit(root)
    assert [(one.name, one.note) for one in stale_results(root)] == [("gone", NO_SCRIPT)]
    write(root, "jaxmem/_train/loop.py", "changed = True\n")
    assert names(root) == {"renamed": ["jaxmem/_train"], "gone": []}


def test_without_git_hashes_are_compared_and_other_results_have_a_message(tmp_path, monkeypatch):
    for path, text in FILES.items():
        write(tmp_path, path, text)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    write_result(tmp_path, "fast")
    write_result(tmp_path, "other", recorded=False)
    (one,) = stale_results(tmp_path)
    assert (one.name, one.note) == ("other", NO_HISTORY)
    assert "in a clone with its history" in listed([one], 2)
    write(tmp_path, "jaxmem/_planner/plan.py", "changed = True\n")
    assert names(tmp_path) == {"fast": ["jaxmem/_planner"], "other": []}


def test_a_shallow_clone_has_the_message_too(root, tmp_path_factory):
    write_result(root, "fast", recorded=False)
    commit(root)
    write(root, "benchmarks/shared/timing.py", "changed = True\n")
    commit(root)
    there = tmp_path_factory.mktemp("shallow") / "clone"
    git(root, "clone", "--depth", "1", root.as_uri(), str(there))
    assert [one.note for one in stale_results(there)] == [NO_HISTORY]
    assert written_by(there, there / "benchmarks/results/fast.json") is None


def test_the_shortest_run_is_listed_first_and_the_known_times_are_added(root):
    write_result(root, "fast", seconds=120.0)
    write_result(root, "other", seconds=60.0)
    for path in ("benchmarks/fast.py", "benchmarks/other.py"):
        write(root, path, "changed = True\n")
    first, second, total = listed(stale_results(root), 2).splitlines()
    assert first.startswith("other: 1.0 min; ")
    assert second.startswith("fast: 2.0 min; ")
    assert total.startswith("2 of 2 results are stale or cannot be compared: 3.0 min for 2")


def written(path: pathlib.Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_report_names_its_sources_and_its_seconds(tmp_path):
    out = tmp_path / "solver.json"
    Report("solver", ["--out", str(tmp_path)]).add("one", 1)
    found = written(out)
    assert found["sources"] == Sources().record("benchmarks/solver.py")["sources"]
    assert {"benchmarks/solver.py", "benchmarks/shared", "jaxmem/_planner"} <= {*found["sources"]}
    assert "jaxmem/_train" not in found["sources"]
    assert found["seconds"] >= 0


@pytest.mark.parametrize("recorded", [True, False])
def test_results_that_are_gone_on_with_keep_their_sources(tmp_path, recorded):
    """The file would otherwise say that its first results are of today's sources."""
    out = tmp_path / "solver.json"
    Report("solver", ["--out", str(tmp_path)]).add("one", 1)
    of_first = {"commit": "0" * 40, "dirty": False, "sources": {"jaxmem/_planner": "1"}}
    old = {k: v for k, v in written(out).items() if k not in (*of_first, "seconds")}
    more = of_first | {"seconds": 1000.0} if recorded else {}
    out.write_text(json.dumps(old | more), encoding="utf-8")
    Report("solver", ["--out", str(tmp_path)]).add("two", 2)
    found = written(out)
    assert found["results"] == {"one": 1, "two": 2}
    assert found["sources"] == more.get("sources")
    assert found["seconds"] is None if not recorded else found["seconds"] >= 1000

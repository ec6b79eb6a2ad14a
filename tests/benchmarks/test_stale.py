"""Results name the sources that they depend on, and results whose sources changed are listed."""

import json
import pathlib
import subprocess

import pytest

from benchmarks.shared.results import Report
from benchmarks.shared.sources import Sources
from benchmarks.shared.stale import NO_HISTORY, NO_SCRIPT, listed, stale_results

FILES = {
    "benchmarks/fast.py": (
        'import jaxmem\nfrom benchmarks.shared import timing\njaxmem.plan("nano local")\n'
    ),
    "configs/nano.toml": "layers = 1\n",
    "benchmarks/shared/timing.py": "",
    "benchmarks/other.py": 'RUN = "-m", "experiments.train"\n',
    "experiments/train.py": "def main():\n    from jaxmem._train import loop\n",
    "jaxmem/__init__.py": "from jaxmem import _public",
    "jaxmem/_public.py": "from jaxmem._planner.plan import plan as plan\n",
    "jaxmem/_planner/plan.py": 'plan = open("gpus.toml")\n',
    "jaxmem/_planner/gpus.toml": "cores = 1\n",
    "jaxmem/_train/loop.py": "",
}


FILES_OF_FAST = "jaxmem/_planner/plan.py", "configs/nano.toml", "jaxmem/_planner/gpus.toml"


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


def test_sources_are_the_files_that_a_script_imports_and_the_configs_that_it_names(root):
    assert Sources(root).imported("benchmarks/fast.py") == {
        "benchmarks/fast.py", "benchmarks/shared/timing.py", "configs/nano.toml",
        "jaxmem/_planner/gpus.toml", "jaxmem/_planner/plan.py",
    }  # fmt: skip
    assert Sources(root).imported("benchmarks/other.py") == {
        "benchmarks/other.py", "experiments/train.py", "jaxmem/_train/loop.py",
    }  # fmt: skip


@pytest.mark.parametrize("path", FILES_OF_FAST)
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_changed_source_makes_a_result_stale(root, path, is_committed):
    write_result(root, "fast")
    assert names(root) == {}
    write(root, path, "changed = true\n")
    if is_committed:
        commit(root)
    assert names(root) == {"fast": [path]}


def test_other_files_and_other_words_make_no_result_stale(root):
    write_result(root, "fast")
    for path in ("jaxmem/_train/loop.py", "benchmarks/other.py", "jaxmem/_planner/other.py"):
        write(root, path, "changed = True\n")
    plan = FILES["jaxmem/_planner/plan.py"]
    write(root, "jaxmem/_planner/plan.py", f'"""A docstring."""\n\n{plan}  # a comment\n')
    commit(root)
    assert names(root) == {}


def test_results_without_a_commit_are_of_the_commit_that_wrote_them(root):
    write_result(root, "fast", recorded=False)
    commit(root)
    assert names(root) == {}
    write(root, "jaxmem/_train/loop.py", "changed = True\n")
    commit(root)
    assert names(root) == {}
    write(root, "benchmarks/shared/timing.py", "changed = True\n")
    assert names(root) == {"fast": ["benchmarks/shared/timing.py"]}


def test_a_result_is_of_the_script_whose_table_has_its_name(root):
    table = 'RESULTS = {"renamed": Benchmark()}\n'
    write(root, "benchmarks/both.py", f"from jaxmem._train import loop\n{table}")
    write_result(root, "renamed", recorded=False)
    write_result(root, "gone", recorded=False)
    commit(root)
    assert [(one.name, one.note) for one in stale_results(root)] == [("gone", NO_SCRIPT)]
    write(root, "jaxmem/_train/loop.py", "changed = True\n")
    assert names(root) == {"renamed": ["jaxmem/_train/loop.py"], "gone": []}


def test_without_git_results_have_a_message(tmp_path, monkeypatch):
    for path, text in FILES.items():
        write(tmp_path, path, text)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert Sources(tmp_path).record("benchmarks/fast.py") == {"commit": None, "dirty": None}
    write_result(tmp_path, "fast")
    write_result(tmp_path, "other", recorded=False)
    found = stale_results(tmp_path)
    assert [(one.name, one.note) for one in found] == [("fast", NO_HISTORY), ("other", NO_HISTORY)]
    assert "in a clone with its history" in listed(found, 2)


def written(path: pathlib.Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", ["jaxmem/_planner/plan.py", "jaxmem/_train/loop.py"])
def test_a_record_says_whether_sources_differ_from_the_commit(root, path):
    write(root, path, "changed = True\n")
    found = Sources(root).record("benchmarks/fast.py")
    assert found["dirty"] == (path == "jaxmem/_planner/plan.py")
    assert len(found["commit"]) == 40


@pytest.mark.parametrize("recorded", [True, False])
def test_results_that_are_gone_on_with_keep_their_commit(tmp_path, recorded):
    """The file would otherwise say that its first results are of today's sources."""
    out = tmp_path / "walk.json"
    Report("walk", "estimates", tmp_path).add("one", 1)
    new = written(out)
    assert new["commit"] == Sources().record("benchmarks/estimates.py")["commit"]
    assert new["seconds"] >= 0
    of_first = {"commit": "0" * 40, "dirty": False}
    old = {k: v for k, v in new.items() if k not in (*of_first, "seconds")}
    more = of_first | {"seconds": 1000.0} if recorded else {}
    out.write_text(json.dumps(old | more), encoding="utf-8")
    Report("walk", "estimates", tmp_path).add("two", 2)
    found = written(out)
    assert found["results"] == {"one": 1, "two": 2}
    assert found["commit"] == more.get("commit")
    assert found["seconds"] is None if not recorded else found["seconds"] >= 1000

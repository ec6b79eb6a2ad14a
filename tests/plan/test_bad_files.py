"""Plans' files with one mistake each: every command that reads one tells the file and the field,
before anything is compiled or written.
"""

import json

import pytest

import jaxmem
from jaxmem.errors import PlanFileError
from tests.shared.bad import mistakes, no_files, refusal
from tests.shared.bad_plans import FILE, READERS, bad_plans, full

pytestmark = pytest.mark.jax_defaults


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    full().save("whole.json")


@pytest.fixture(scope="module")
def all_bad(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    full().save(path)
    return list(bad_plans(path.read_text("utf-8")))


# Every so many of them; benchmarks/faults.py tries all.
@pytest.mark.parametrize("way", READERS)
def test_bad_plans_are_refused(way, all_bad):
    first = list(READERS).index(way)
    chosen, (main, line) = all_bad[first :: 5 * len(READERS)], READERS[way]
    assert len({bad.content for bad in chosen}) >= 90
    for bad in chosen:
        assert refusal(bad, main, line, FILE) == [], bad
    assert len({bad.kind for bad in chosen}) >= 7


@pytest.mark.parametrize("way", READERS)
def test_what_is_no_file_is_refused(way, tmp_path):
    main, line = READERS[way]
    for what, path in no_files(tmp_path, ".json").items():
        if way == "report" and what in ("a folder", "below a file"):
            continue  # a folder may be a run's, and beside a plan there must be room for the page
        if what == "a NUL":
            continue  # which no command line holds
        assert mistakes(main, [word.replace(FILE, path) for word in line], path) == [], what


def test_a_plan_without_a_budget_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(full().to_json() | {"budget_bytes": 0}))
    with pytest.raises(PlanFileError, match="`budget_bytes`: got 0"):
        jaxmem.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("path", [None, 5, b"plan.json"])
def test_what_is_no_path_is_told(path):
    with pytest.raises(PlanFileError, match=r"Plan.load: cannot read .*str"):
        jaxmem.Plan.load(path)


def test_the_one_they_are_made_of_is_in_order():
    plan = full()
    assert jaxmem.Plan.load("whole.json") == plan
    empty = {field for field, value in plan.to_json().items() if value in (None, [], {}, "")}
    assert empty == set()

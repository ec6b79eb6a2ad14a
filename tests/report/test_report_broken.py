"""The page of what is broken, missing or odd: it is made whole and honest, or an error names the
file and the field.
"""

import dataclasses
import json

import pytest

from jaxmem import plans
from jaxmem._core.actions import KEEP
from jaxmem._result.plan.rows import Bytes, Point
from jaxmem._train.rectifier.counts import Outliers
from jaxmem._train.report.report import report_runs as report
from jaxmem.errors import PlanFileError
from tests.shared.report_pages import made, page_of, row, write_run

COUNTED = Outliers(1, "block", "up", 10, (1,), (4.0,), ((2,),)).to_json() | {"counts": ["x"]}


@pytest.mark.parametrize(
    "change",
    [
        {"points": ()},
        {"points": (Point(0, 0.0),), "compiled_bytes": 0, "baseline_bytes": 0},
        {"points": (Point(5, 0.1),), "budget_bytes": 2**63 - 1},
        {"budget_bytes": 0, "predicted_seconds": 0.0, "baseline_seconds": 0.0},
        {"parts": Bytes(0, 0, 0), "baseline_parts": Bytes(0, 0, 0)},
        {"parts": Bytes(10, 20, -5)},
        {"rows": ()},
        {"rows": (row(KEEP, kind=None, shape=()),)},
        {"notes": ()},
    ],
    ids=str,
)
def test_what_is_missing_or_odd_does_not_break_the_page(change, tmp_path):
    page_of(tmp_path, write_run(tmp_path / "run", dataclasses.replace(made(), **change)))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"step": 2, "lo', "line 2: .*expected JSON"),
        ("metrics.jsonl", '{"step": 1, "step_seconds": -1}', "field `step_seconds`: got -1"),
        ("metrics.jsonl", "3\n", "line 1: got 3, expected an object"),
        ("metrics.jsonl", '\n{"loss": 2}\n', "line 2, field `step`: got None"),
        ("metrics.jsonl", '{"step": NaN, "loss": 2}', "line 1, field `step`: got nan"),
        ("metrics.jsonl", '{"step": 1, "loss": "<b>"}', "field `loss`: got '<b>'"),
        ("metrics.jsonl", b"\xff\xfe", "cannot read .*metrics.jsonl"),
        ("summary.json", "{", "summary.json': .*expected JSON"),
        ("summary.json", "[]", "summary.json', .*got 'list', expected an object"),
        ("summary.json", '{"val_loss": "2"}', "field `val_loss`: got '2', expected a number"),
        ("summary.json", '{"command": 3}', "field `command`: got 3, expected a text"),
        ("explained.json", '{"total_bytes": "many"}', "field `total_bytes`: got 'many'"),
        ("decisions.jsonl", '{"step": "x", "taken": true, "why": ""}', "line 1, field `step`"),
        ("decisions.jsonl", "[]", "line 1: got"),
        ("outliers.jsonl", '{"step": 1, "block": 3}', "line 1, field `block`"),
        ("outliers.jsonl", "{", "line 1: Expecting"),
        ("outliers.jsonl", json.dumps(COUNTED), r"line 1, field `counts\[0\]`: got 'x'"),
        ("plan.json", "{}", "plan.json', field `schema`"),
        ("plan.json", "", "cannot read .*plan.json"),
    ],
)
def test_a_broken_file_is_named(name, content, told, tmp_path):
    run = write_run(tmp_path / "run", made(), [1.0], config="nano")
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "run" / name).write_bytes(data)
    with pytest.raises(PlanFileError, match=told):
        report([run], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_folder_without_results_and_no_folder(tmp_path):
    message = r"holds none of plan\.json, metrics\.jsonl, summary\.json"
    with pytest.raises(PlanFileError, match=message):
        report([str(tmp_path)], tmp_path / "page.html")
    with pytest.raises(PlanFileError, match="cannot read .*nothing"):
        report([str(tmp_path / "nothing")], tmp_path / "page.html")


def test_the_page_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "page.html").write_text("before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        plans.report(made(), tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == "before"

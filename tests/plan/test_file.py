"""Broken plan files: each error names the file, the field, what was got and what was expected."""

import dataclasses
import json

import pytest

import jaxmem
from jaxmem._core.actions import KEEP, Action, Choice
from jaxmem._result.plan.file import read_assignment
from jaxmem._result.plan.plan import Plan
from jaxmem._result.plan.rows import Bytes, Point
from jaxmem.errors import PlanFileError
from tests.shared import plans

pytestmark = pytest.mark.core
ACTIONS = {
    "block": {
        "h": Choice("keep"),
        "up": Choice("compress", "grouped_symmetric(group=64,scale=bfloat16)"),
    }
}
PARTS, POINTS = (Bytes(4, 3, 2), Bytes(4, 14, 2)), (Point(8, 1.5), Point(20, 0.9))
PLAN = Plan(
    ACTIONS,
    10,
    9,
    9,
    20,
    0,
    1.0,
    0.9,
    0.1,
    0.1,
    0.1,
    3,
    "measured",
    "local",
    "abc",
    "0.0",
    *PARTS,
    POINTS,
    compiler_options={"xla_gpu_enable_latency_hiding_scheduler": True},
)


def saved(tmp_path):
    path = tmp_path / "plan.json"
    codec = str(jaxmem.codecs.parse(ACTIONS["block"]["up"].codec))
    PLAN.actions["block"]["up"] = Choice("compress", codec)
    PLAN.save(path)
    return path


def test_round_trip(tmp_path):
    assert Plan.load(saved(tmp_path)) == PLAN


def put(*path_and_value):
    *path, last, value = path_and_value

    def change(data):
        for key in path:
            data = data[key]
        data[last] = value

    return change


MEASURED = {"name": "the plan", "bytes": 9, "lower": 0.9, "median": 1.0, "upper": 1.1} | {
    "rounds": 5,
    "chosen": True,
}


def drop(key):
    return lambda data: data.pop(key)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (put("schema", 2), "schema"),
        (put("schema", True), "schema"),
        (drop("schema"), "schema"),
        (put("budget_bytes", "10"), "budget_bytes"),
        (put("budget_bytes", -1), "budget_bytes"),
        (put("compiled_bytes", None), "compiled_bytes"),
        (put("predicted_bytes", 1.5), "predicted_bytes"),
        (put("predicted_seconds", float("nan")), "predicted_seconds"),
        (put("predicted_seconds", True), "predicted_seconds"),
        (drop("compiles"), "compiles"),
        (put("target", ""), "target"),
        (put("fingerprint", 7), "fingerprint"),
        (drop("actions"), "actions"),
        (put("actions", {}), "actions"),
        (put("actions", "block", 3), "actions"),
        (put("actions", "block", "h", "keep"), r"actions\.block\.h"),
        (put("actions", "block", "h", {"action": "forget"}), r"actions\.block\.h\.action"),
        (put("actions", "block", "h", {"action": "compress"}), r"actions\.block\.h"),
        (
            put(
                "actions",
                "block",
                "h",
                {"action": "keep", "codec": "naive_per_token(scale=float32)"},
            ),
            r"actions\.block\.h",
        ),
        (put("actions", "block", "up", "codec", "groped()"), r"actions\.block\.up\.codec"),
        (put("actions", "block", "up", "codec", 5), r"actions\.block\.up\.codec"),
        (put("notes", "x"), "notes"),
        (drop("parts"), "parts"),
        (put("baseline_parts", "saved", 1.5), "baseline_parts"),
        (put("points", {}), "points"),
        (put("points", 1, "seconds", float("inf")), r"points\[1\]"),
        (put("points", 0, [8, 1.5]), r"points\[0\]"),
        (put("points", 1, "actions", []), r"points\[1\]\.actions"),
        (put("points", 1, "uncertain_seconds", "1"), r"points\[1\]\.uncertain_seconds"),
        (put("points", 1, "actions", {"block": {"h": "keep"}}), r"points\[1\]\.actions\.block\.h"),
        (put("rows", [{"tag": "h"}]), "rows"),
        (put("rows", 3), "rows"),
        (put("measured", 3), "measured"),
        (put("measured", [{"name": "the plan"}]), r"measured\[0\]"),
        (put("measured", [MEASURED | {"median": "1"}]), r"measured\[0\]\.median"),
        (put("measured", [MEASURED | {"chosen": 1}]), r"measured\[0\]\.chosen"),
        (put("uncertain_seconds", -1), "uncertain_seconds"),
        (put("baseline_source", ""), "baseline_source"),
        (put("divided", "all"), "divided"),
        (put("divided", "layers"), "divided"),  # without places
        (put("compiler_options", []), "compiler_options"),
        (put("compiler_options", {"xla_gpu_dump": "x"}), "compiler_options"),
    ],
)
def test_a_broken_field_is_named(change, field, tmp_path):
    path = saved(tmp_path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(jaxmem.errors.PlanFileError, match=f"plan.json.*`{field}") as caught:
        Plan.load(path)
    assert "expected" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"plan"', "\x00\xff"])
def test_not_a_plan(text, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(jaxmem.errors.PlanFileError, match="plan.json"):
        Plan.load(path)


def test_no_file(tmp_path):
    with pytest.raises(jaxmem.errors.PlanFileError, match="No such file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(jaxmem.errors.PlanFileError, match="directory"):
        Plan.load(tmp_path)


def test_lines_of_several_tensors_say_how_many_and_others_are_as_they_were(tmp_path):
    one, several = plans.row("h", KEEP), dataclasses.replace(plans.row("up", KEEP), count=2)
    made = plans.plan(rows=(one, several))
    first, second = made.to_json()["rows"]
    assert "count" not in first
    assert second["count"] == 2
    made.save(tmp_path / "plan.json")
    assert jaxmem.Plan.load(tmp_path / "plan.json").rows == (one, several)
    assert "up 2 x (4, 8)" in str(made)


def test_a_policy_is_read_as_actions_by_name_or_as_a_plans(tmp_path):
    by_name = {"block": {"h": "keep", "up": {"action": "compress", "codec": "bit_mask()"}}}
    found = read_assignment(by_name, "policy.json")
    assert found["block"] == {"h": KEEP, "up": Choice(Action.COMPRESS, "bit_mask()")}
    assert read_assignment(PLAN.to_json(), "plan.json") == ACTIONS


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ([], "actions"),
        ({}, "actions"),
        ({"block": "keep"}, r"actions\.block"),
        ({"block": {"h": "forget"}}, r"actions\.block\.h\.action"),
        ({"block": {"h": "compress"}}, r"actions\.block\.h"),
        ({"block": {"h": 3}}, r"actions\.block\.h"),
    ],
)
def test_a_policy_that_is_broken_is_named(data, field):
    with pytest.raises(PlanFileError, match=f"policy 'p.json', field `{field}`"):
        read_assignment(data, "p.json")

"""Broken plan files: each error names the file, the field, what was got and what was expected."""

import dataclasses

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

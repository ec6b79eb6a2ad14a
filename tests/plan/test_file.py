"""Lines of a plan's table, and policies, in files."""

import dataclasses

import pytest

import jaxmem
from jaxmem._core.actions import KEEP, Action, Choice
from jaxmem._result.plan.file import read_assignment
from jaxmem.errors import PlanFileError
from tests.shared import plans

pytestmark = pytest.mark.core


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
    assert read_assignment(plans.plan().to_json(), "plan.json") == plans.plan().actions


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

"""Lines of a plan's table, policies, and plans that leave a step as its author wrote it: in a file,
in a table, and on a page.
"""

import dataclasses
import json

import pytest

import jaxmem
from jaxmem._core.actions import KEEP, Action, Choice
from jaxmem._result.plan.file import read_assignment
from jaxmem._result.plan.rows import Bytes, WrittenStep
from jaxmem.errors import PlanFileError
from tests.shared import plans

pytestmark = pytest.mark.core
MIB = 2**20
WRITTEN = WrittenStep(7 * MIB, 0, 0.0135, Bytes(4 * MIB, 1 * MIB, 2 * MIB))


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


def as_written() -> jaxmem.Plan:
    return plans.plan(actions={}, rows=(), as_written=True, written=WRITTEN)


@pytest.mark.parametrize("plan", [as_written(), plans.plan(written=WRITTEN)])
def test_a_file_keeps_what_is_said_of_the_step_as_written(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert jaxmem.Plan.load(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["written"]["bytes"] == 7 * MIB


def test_only_a_plan_that_leaves_the_step_may_have_no_actions(tmp_path):
    data = as_written().to_json() | {"as_written": False}
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanFileError, match="field `actions`"):
        jaxmem.Plan.load(tmp_path / "plan.json")


def test_the_two_baselines_have_names_of_their_own(tmp_path):
    for plan in (as_written(), plans.plan(written=WRITTEN)):
        text = str(plan)
        assert "everything kept: 20.0 MiB; as written: 7.0 MiB" in text
        jaxmem.plans.report(plan, tmp_path / "plan.html")
        page = (tmp_path / "plan.html").read_text()
        assert "As written" in page
        assert "13.50 ms" in page
    assert "the checkpoints of its own decide it" in str(as_written())
    assert not as_written().keeps_everything


def test_a_function_under_a_plan_that_leaves_it_is_itself():
    def loss(x):
        return x

    assert jaxmem.auto(loss, as_written()) is loss
    assert jaxmem.auto(loss)(as_written()) is loss
    assert jaxmem.auto(loss, None) is loss

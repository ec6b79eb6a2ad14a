"""A plan as plain text and as HTML, and what differs between two plans. Lines of a plan's table,
policies, and plans that leave a step as its author wrote it: in a file, in a table, and on a page.
"""

import dataclasses
import json
from xml.etree import ElementTree

import pytest

import jaxmem
from jaxmem._core.actions import KEEP, Action, Choice
from jaxmem._core.files import write_json
from jaxmem._result.frontier import Cell, Frontier
from jaxmem._result.plan.difference import difference
from jaxmem._result.plan.file import read_assignment
from jaxmem._result.plan.plan import pace
from jaxmem._result.plan.rows import Bytes, Measured, WrittenStep
from jaxmem.errors import PlanFileError
from tests.shared import plans
from tests.shared.plans import CODEC, WHY, other, plan

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
    write_json(policy := tmp_path / "policy.json", by_name)
    found = read_assignment(policy)
    assert found["block"] == {"h": KEEP, "up": Choice(Action.COMPRESS, "bit_mask()")}
    plans.plan().save(tmp_path / "plan.json")
    assert read_assignment(tmp_path / "plan.json") == plans.plan().actions


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
def test_a_policy_that_is_broken_is_named(data, field, tmp_path):
    write_json(policy := tmp_path / "p.json", data)
    with pytest.raises(PlanFileError, match=f"policy: '.*p.json', field `{field}`"):
        read_assignment(policy)


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


def test_the_file_of_a_frontier_is_named(tmp_path):
    cells = (Cell(8, 2**20, 2**21),)
    Frontier(cells, "h200", 2**30, "xla").save(tmp_path / "frontier.json")
    with pytest.raises(PlanFileError, match="frontier.json.*file of a frontier.*Frontier.load"):
        jaxmem.Plan.load(tmp_path / "frontier.json")


def test_the_two_baselines_have_names_of_their_own(tmp_path):
    for made in (as_written(), plans.plan(written=WRITTEN)):
        text = str(made)
        assert "everything kept: 20.0 MiB; as written: 7.0 MiB" in text
        jaxmem.plans.report(made, tmp_path / "plan.html")
        page = (tmp_path / "plan.html").read_text()
        assert "As written" in page
        assert "13.50 ms" in page
    assert "the checkpoints of its own decide it" in str(as_written())
    assert not as_written().keeps_everything


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.012, ": 2.00 ms more, ± 0.50 ms"),
        (0.009, ": 1.00 ms less, ± 0.50 ms"),
        (0.0104, ": equal as far as is known, ± 0.50 ms"),
        (0.0096, ": equal as far as is known, ± 0.50 ms"),
    ],
)
def test_times_are_told_beside_those_of_everything_kept_as_far_as_they_are_known(seconds, said):
    told = plan(predicted_seconds=seconds, uncertain_seconds=5e-4, baseline_source="xla")
    line = str(told).splitlines()[5]
    start = f"step {1e3 * seconds:.2f} ms as predicted, everything kept 10.00 ms (XLA's estimate)"
    assert line.startswith(start + said)


@pytest.mark.parametrize(
    ("chosen", "kept", "said"),
    [
        (0.009, 0.010, "for 10.0 % less step time as measured"),
        (0.011, 0.010, "for 10.0 % more step time as measured"),
        (0.0101, 0.010, "as far as times are known"),  # the quartiles are 0.2 ms apart
        (0.009, None, "for 20.0 % more step time as predicted"),
    ],
)
def test_the_pace_of_a_plan_is_measured_if_everything_kept_ran_too(chosen, kept, said):
    """The prediction, 20 % more, does not count then."""
    times = {"the plan": chosen} | ({} if kept is None else {"everything kept": kept})
    runs = [
        Measured(name, MIB, t - 1e-4, t, t + 1e-4, 5, name == "the plan")
        for name, t in times.items()
    ]
    made = plan(predicted_seconds=0.012, uncertain_seconds=5e-4, measured=tuple(runs))
    assert pace(made).endswith(said)
    others = made.measured[::-1]
    assert pace(dataclasses.replace(made, measured=others)) == pace(made)


def test_a_plan_that_keeps_everything_has_one_time():
    kept = plan(actions={"block": {"*": KEEP}}, baseline_source="measured")
    assert str(kept).splitlines()[5] == "step with everything kept 10.00 ms (measured); 3 compiles"


def test_a_notebook_shows_the_same_table():
    made = plan(notes=("<script>alert(1)</script>",))
    text = made._repr_html_()
    assert "<script>" not in text
    read, plain = ElementTree.fromstring(text.replace("<br>", "\n")), str(made).splitlines()
    cells = [cell.text for cell in read.iter() if cell.tag in ("th", "td")]
    assert cells[:8] == plain[0].split()
    assert cells[16:] == [
        "up", "linear", "compress", "grouped_symmetric", "1.5 KiB", "512 B", "0.250", WHY,
    ]  # fmt: skip
    assert read.findtext("p").splitlines() == plain[3:]


def test_the_difference_of_equal_plans_is_none():
    same = difference(plan(), plan(profile_seconds=7.0))
    assert str(same) == "the plans are the same"
    assert same.to_json() == {"figures": {}, "seconds_comparable": True, "actions": {}}


def test_the_difference_names_figures_and_tags():
    found = difference(plan(), other())
    assert str(found).splitlines() == [
        "budget_bytes: 10.0 MiB -> 8.0 MiB (-2,097,152 bytes)",
        "time_source: roofline -> measured",
        "microbatches: - -> 4",
        "predicted_seconds: 12.000 ms -> 13.000 ms, by other means: not to be compared",
        "block/h: keep -> recompute",
        "block/new: not in the plan -> offload",
    ]
    comparable = difference(plan(), plan(predicted_seconds=0.0135, actions={"block": {"*": "x"}}))
    assert (
        str(comparable).splitlines()[0] == "predicted_seconds: 12.000 ms -> 13.500 ms (+1.500 ms)"
    )
    assert f"block/up: compress {CODEC} -> not in the plan" in str(comparable)
    assert "block/all that no tag names: not in the plan -> x" in str(comparable)


def test_the_difference_as_json():
    data = json.loads(json.dumps(difference(plan(), other()).to_json()))
    assert data["figures"]["budget_bytes"] == [10 * 2**20, 8 * 2**20]
    assert data["figures"]["microbatches"] == [None, 4]
    assert data["seconds_comparable"] is False
    assert data["actions"] == {"block": {"h": ["keep", "recompute"], "new": [None, "offload"]}}

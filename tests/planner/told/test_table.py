"""The table's lines: what each tag costs, and what the best plan without its choice would. The
points of the curve: each names the plan that it is of, and priced anew, this has the point's
numbers.
"""

import re

import pytest

from jaxmem._core.actions import KEEP, UNTAGGED
from jaxmem._core.groups import keeps_everything
from jaxmem._core.profile import Option
from jaxmem._planner.outcome.pareto import POINTS, curve
from jaxmem._planner.outcome.table import rows
from jaxmem._planner.search.step_time import StepTime
from jaxmem._planner.solve.cost import everything
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem._planner.solve.solve import solve
from tests.shared.profiles import block, chain, deep, flat, oracle, prices, profile

LAYERS = 3


@pytest.mark.parametrize("room", [9, 20, 40, 60, 90])
def test_why_is_the_dearer_plan_without_the_choice(room):
    made = profile(chain(layers=LAYERS, runs=LAYERS), link=100.0)
    got = solve(ActionProblem(made, room=room))
    priced = oracle(made, flat(got.actions))
    for row in rows(ActionProblem(made, room), got.actions):
        key = (row.block, row.tag)
        fitting = [p for p in prices(made) if p.bytes <= room]
        others = [p for p in fitting if p.effective[key] != row.choice]
        if row.why == "nothing reads it again":
            assert {p.effective[key] for p in others if p.saved == priced.saved} <= {row.choice}
        elif row.why == "nothing else fits":
            assert not others
        else:
            choice, seconds = re.fullmatch(r"(\w+): \+([\d.]+) ms a step", row.why).groups()
            best = min(others, key=lambda p: p.priced)
            assert float(seconds) / 1e3 == pytest.approx(best.seconds - priced.seconds, abs=1e-3)
            near = [p for p in others if p.priced <= best.priced + 1e-3]
            assert choice in {p.effective[key].action.value for p in near}


def test_a_name_of_two_places_is_one_line():
    """x -> a -> tag "u" -> b (twice the bytes) -> tag "u" again."""
    seconds = (1.0, None), (0.0, "u"), (2.0, None), (0.0, "u")
    equations = [([i], [i + 1], *one) for i, one in enumerate(seconds)]
    options = [("u", [Option(KEEP, size, 0, size / 100)]) for size in (10, 20)]
    made = profile(block(equations, [2, 4], [5, 10, 10, 20, 20], options))
    (kept,) = rows(ActionProblem(made, 30), {"block": {"u": KEEP}})
    assert (kept.count, kept.bytes_before, kept.bytes_after) == (2, 30, 30)
    assert kept.milliseconds == pytest.approx(1e3 * 0.3)
    (again,) = rows(ActionProblem(made, 29), {"block": {}})
    assert (again.count, again.bytes_before, again.bytes_after) == (2, 30, 0)
    assert again.milliseconds == pytest.approx(1e3 * 3)
    assert (again.size, kept.size) == ("2 x (1)", "2 x (1)")


def test_no_choice_is_explained_where_everything_fits():
    made = profile(chain())
    actions = {"block": {"u": KEEP, "v": KEEP, UNTAGGED: KEEP}}
    assert {r.why for r in rows(ActionProblem(made, 0), actions)} == {"everything fits"}


MADE = {
    "a chain": profile(chain()),
    "a deep block": profile(deep(tags=5, depth=6)),
    "two blocks": profile(chain(), chain(name="other", layers=3)),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_each_point_is_priced_as_its_plan_is(made):
    problem = ActionProblem(made)
    kept = everything(made).saved_bytes
    step_time = StepTime(everything(made).seconds, "pieces", everything(made), 1 / 8)
    points = curve(problem, lambda size: size, step_time, kept)
    assert 1 < len(points) <= POINTS + 1
    tags = {block.name: {tag.name for tag in block.tags} for block in made.blocks}
    for point in points:
        if keeps_everything(point.actions):
            assert (point.bytes, point.seconds) == (kept, everything(made).seconds)
            continue
        named = {label: {*chosen} - {UNTAGGED} for label, chosen in point.actions.items()}
        assert named == tags
        again = ActionSolution.of(problem, point.actions)
        assert (again.bytes, again.cost.seconds) == pytest.approx((point.bytes, point.seconds))

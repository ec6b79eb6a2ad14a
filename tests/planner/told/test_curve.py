"""Each point of the curve names the plan that it is of: priced anew, it has the point's numbers."""

import dataclasses

import pytest

from jaxmem._core.actions import REST, keeps_everything
from jaxmem._planner.outcome.pareto import POINTS, curve
from jaxmem._planner.solve.cost import everything
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solution import ActionSolution
from tests.shared.profiles import chain, deep, profile

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    "made",
    [
        profile(chain()),
        profile(deep(tags=5, depth=6)),
        profile(chain(), dataclasses.replace(chain(), name="other", layers=3)),
    ],
    ids=["a chain", "a deep block", "two blocks"],
)
def test_each_point_is_priced_as_its_plan_is(made):
    problem = ActionProblem(made)
    kept = everything(made).saved_bytes
    points = curve(
        problem, lambda size: size, lambda cost: cost.seconds, lambda cost: cost.seconds / 8, kept
    )
    assert 1 < len(points) <= POINTS + 1
    tags = {block.name: {tag.name for tag in block.tags} for block in made.blocks}
    for point in points:
        if keeps_everything(point.actions):
            assert (point.bytes, point.seconds) == (kept, everything(made).seconds)
            continue
        named = {label: {*chosen} - {REST} for label, chosen in point.actions.items()}
        assert named == tags
        again = ActionSolution.of(problem, point.actions)
        assert (again.bytes, again.cost.seconds) == pytest.approx((point.bytes, point.seconds))

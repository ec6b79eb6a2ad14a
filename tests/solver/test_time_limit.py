"""When the solver's time runs out: what it found is taken, and said not to be proven."""

import types

import highspy
import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._core.actions import ALL
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solve import least_bytes, solve
from jaxmem.errors import SolverError
from tests.shared import models, profiles
from tests.shared.profiles import profile

pytestmark = pytest.mark.core


@pytest.fixture
def out_of_time(monkeypatch):
    """A solver that tells of any optimum as of what it had found when its time ran out."""
    status, late = highspy.Highs.modelStatusToString, "Time limit reached"
    told = lambda *given: late if status(*given) == "Optimal" else status(*given)
    monkeypatch.setattr(highspy.Highs, "modelStatusToString", told)
    info, real = {"primal_solution_status": 2, "mip_gap": 0.25}, highspy.Highs.getInfo
    read = lambda found: {n: getattr(found, n) for n in dir(found) if not n.startswith("_")}
    overlaid = lambda highs: types.SimpleNamespace(**(read(real(highs)) | info))
    monkeypatch.setattr(highspy.Highs, "getInfo", overlaid)
    return info


def problem():
    made = profile(profiles.deep(), link=55e9)
    return ActionProblem(made, room=least_bytes(ActionProblem(made)).bytes * 2)


@pytest.mark.parametrize("gap", [0.0, 0.25, float("inf")])
def test_what_was_found_is_taken_with_its_gap(out_of_time, gap):
    out_of_time["mip_gap"] = gap
    found = solve(problem())
    assert found.bytes <= problem().room
    assert found.gap == gap


def test_where_nothing_was_found_it_is_an_error(out_of_time):
    out_of_time["primal_solution_status"] = 0
    with pytest.raises(SolverError, match="status 'Time limit reached' and no assignment"):
        solve(ActionProblem(profile(profiles.deep(), link=55e9), room=2**31))


@pytest.mark.jax_defaults
def test_a_plan_that_is_not_proven_says_so(out_of_time, quick_compiles):
    args = jax.eval_shape(
        lambda: (models.parameters(4, 32, jnp.float32), models.batch(8, 64, 32, jnp.float32))
    )
    plan = jaxmem.plan(models.build_with(models.scanned), *args, budget="2MiB", actions=ALL)
    assert plan.compiled_bytes <= plan.budget_bytes
    assert plan.notes[-1] == (
        "the solver's time ran out before the assignment was proven fastest: 25.0% of what it"
        " decides about may be gained"
    )


def test_no_time_at_all_is_an_error():
    with pytest.raises(SolverError, match=r"no assignment; `time_limit` is 0\.0 s"):
        solve(ActionProblem(profile(profiles.deep(), link=55e9), room=2**31, time_limit=0.0))

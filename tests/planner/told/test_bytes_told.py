"""No message tells less bytes than none, whatever a compile and the memory model say."""

import dataclasses
import re
from fractions import Fraction

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from jaxmem._core.actions import KEEP, UNTAGGED
from jaxmem._core.bytes import show_bytes
from jaxmem._planner.advice import infeasible
from jaxmem._planner.explain.names import UNSURE, without
from jaxmem._planner.outcome.searched import searched_plan
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.trial import Limits, Trial
from jaxmem._planner.solve.cost import evaluate
from jaxmem._result.plan.rows import Bytes
from jaxmem._target.compiled.compiled import Compiled
from tests.shared import searches as stubs
from tests.shared.profiles import INT4, chain, profile

CHECKS = list(hypothesis.HealthCheck)
few = hypothesis.settings(max_examples=15, deadline=None, suppress_health_check=CHECKS)
NEGATIVE = re.compile(r"-\s?[\d.]+ ?(B|KiB|MiB|GiB|TiB|bytes)\b")
PLANS = ({UNTAGGED: KEEP}, {}, {"u": KEEP, "v": KEEP}, {"u": INT4}, {"v": KEEP})


def trial(made, choices, total: int, arguments: int, predicted: int) -> Trial:
    """A compile of so many bytes, fewer than what the plan saves among them."""
    compiled = Compiled(total, arguments, total - arguments, 0, 0, 0, None, 0, 0, 0.0)
    actions = {"block": choices}
    return Trial(CompiledStep(actions, compiled), evaluate(made, actions), predicted)


@st.composite
def searches(draw) -> Search:
    """Searches whose compiles have little to do with what is saved."""
    made = profile(chain(layers=draw(st.integers(1, 50)), runs=50))
    arguments = draw(st.integers(0, 200))
    totals = [arguments + draw(st.integers(0, 3000)) for _ in PLANS]
    budget = draw(st.integers(1, 4000))
    kept = trial(made, PLANS[0], totals[0], arguments, 0)
    search = stubs.search(made, Limits(budget, budget, 10**9), kept)
    for choices, total in zip(PLANS[1:], totals[1:]):
        model = search.model()
        working = model.predict({"block": choices})
        predicted = search.predicted(evaluate(made, {"block": choices}).saved_bytes + working)
        search.plan_trials.append(trial(made, choices, total, arguments, predicted))
    return search


@few
@given(searches())
def test_plans_and_errors_tell_no_negative_bytes(search):
    message = str(infeasible(search))
    assert not NEGATIVE.search(message), message
    for best in search.trials:
        search.best = best
        plan = searched_plan(search)
        for parts, of in ((plan.parts, best), (plan.baseline_parts, search.baseline)):
            assert sum(dataclasses.astuple(parts)) == of.total
            assert min(dataclasses.astuple(parts)) >= 0
        assert plan.predicted_bytes >= 0
        assert min((p.bytes for p in plan.points), default=0) >= search.static >= 0
        assert not NEGATIVE.search(str(plan)), str(plan)


@given(st.integers(0, 2**63), st.integers(-(2**63), 2**63), st.integers(-(2**63), 2**63))
def test_parts_add_up_and_none_is_negative(total, arguments, saved):
    parts = Bytes.of(total, arguments, saved)
    assert sum(dataclasses.astuple(parts)) == total
    assert min(dataclasses.astuple(parts)) >= 0
    if 0 <= arguments <= total and 0 <= saved <= total - arguments:
        assert (parts.arguments, parts.saved) == (arguments, saved)


@given(st.fractions(min_value=Fraction(-1, 2), max_value=2**70))
def test_nothing_is_shown_as_minus_nothing(count):
    assert not show_bytes(float(count)).startswith("-")


@given(st.lists(st.tuples(st.sampled_from(UNSURE), st.integers(1, 100))), st.integers(0, 500))
def test_what_explain_takes_away_leaves_parts_that_add_up(sizes, excess):
    rows = [(kind, kind, str(i), size) for i, (kind, size) in enumerate(sizes)]
    whole = sum(size for _, size in sizes)
    left = without(rows, excess)
    assert sum(size for *_, size in left) == max(0, whole - excess)
    assert all(size > 0 for *_, size in left)
    # What is surer is whole unless all that is less sure is gone.
    touched = {UNSURE.index(r[0]) for r in rows if r not in left}
    assert all(UNSURE.index(r[0]) >= max(touched, default=0) for r in left)

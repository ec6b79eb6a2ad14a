"""Estimates teach the solver: it is asked again until what it answers is expected to fit."""

import types
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem._core.actions import KEEP, RECOMPUTE
from jaxmem._planner.search.estimates import MOST_EQUATIONS, MOST_ESTIMATES, Estimates, agreed
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.memory import working_bytes
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solve import least_bytes, solve
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem.errors import SolverError
from tests.shared.profiles import chain, profile

pytestmark = pytest.mark.core
MADE = profile(chain(layers=4, runs=4))
NOTHING = {"block": {}}
BACKEND = types.SimpleNamespace(stops_at_buffers=False)
BOUNDS = dict(MOST_EQUATIONS)
EQUATIONS = 1000  # of each traced step
# Traces nothing: `Told` knows what an estimate would tell.
NOBODY: Any = types.SimpleNamespace(backend=BACKEND)


class Told(Estimates):
    """Estimates whose working bytes are told by a function of the actions."""

    def __init__(self, working):
        super().__init__(NOBODY, MADE)
        self._working, self.asked = working, []

    def estimate_step(self, actions):
        self.asked.append(actions)
        return evaluate(MADE, actions).saved_bytes + self._working(actions), EQUATIONS


def stored(actions) -> list[tuple[str, str]]:
    """What an assignment stores: a tag that it leaves out is recomputed."""
    return sorted((t, str(c)) for t, c in actions["block"].items() if c != RECOMPUTE)


def drawn(sizes):
    """Working bytes that follow from the choices as nothing linear does."""

    def working(actions) -> int:
        text = stored(actions)
        return sizes[sum(ord(letter) for pair in text for word in pair for letter in word) % 7]

    return working


def asked(room, estimates):
    def ask(model):
        problem = ActionProblem(MADE, room - int(model.reference), working=working_bytes(model))
        return solve(problem) or least_bytes(problem)

    return agreed(ask, lambda: estimates.model([]), room, estimates)


@hypothesis.settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=7, max_size=7), st.integers(0, 900))
def test_the_answer_fits_or_was_asked_for_again(sizes, room):
    estimates = Told(drawn(sizes))
    estimates.learn(NOTHING)
    answer = asked(room, estimates)
    assert answer is not None
    total = answer.saved_bytes + drawn(sizes)(answer.actions)
    if (
        total > room
    ):  # estimates did not help: all were used up, or the last two answers were the same
        known = [stored(actions) for actions in estimates.asked]
        assert len(estimates.asked) > MOST_ESTIMATES or stored(answer.actions) in known
    # nothing is estimated twice
    assert (
        len(estimates.asked)
        == len({repr(stored(a)) for a in estimates.asked})
        <= MOST_ESTIMATES + 1
    )


def test_a_walk_that_tells_of_more_memory_makes_the_solver_ask_for_less():
    generous, strict = Told(lambda _: 0), Told(lambda actions: 400 * bool(actions["block"]))
    for estimates in (generous, strict):
        estimates.learn(NOTHING)
    room = evaluate(MADE, {"block": {"u": KEEP, "v": KEEP}}).saved_bytes
    free, bound = asked(room, generous), asked(room, strict)
    assert free is not None
    assert bound is not None
    assert free.seconds < bound.seconds
    assert bound.saved_bytes < free.saved_bytes


def test_compiles_tell_by_how_much_walks_are_off():
    kept = {"block": {"u": KEEP}}
    estimates = Told(lambda _: 100)
    estimates.learn(NOTHING)
    estimates.learn(kept)
    model = estimates.model([(NOTHING, 170.0)])
    assert model.predict(NOTHING) == 170
    assert model.predict(kept) == pytest.approx(170, abs=1)
    # what nobody estimated is told by the fitted sum
    assert model.predict({"block": {"v": KEEP}}) > 0


def limited(monkeypatch, **limits) -> Told:
    monkeypatch.setattr("jaxmem._planner.search.estimates.MOST_EQUATIONS", BOUNDS | limits)
    return Told(lambda _: 0)


def test_a_limit_does_not_depend_on_what_other_purposes_estimated(monkeypatch):
    """The least bytes are the same whatever was estimated before."""
    many = [{"block": tags} for tags in ({"u": KEEP}, {"v": KEEP}, {"u": KEEP, "v": KEEP})]
    alone, after = (limited(monkeypatch, least=EQUATIONS) for _ in range(2))
    for actions in many:
        after.learn(actions)
    found = [[e.estimate_for_least(a) is not None for a in many] for e in (alone, after)]
    assert found == [[True, True, False]] * 2
    assert alone.estimate_for_least(many[0]) is not None, "it was made before the limit"


def test_estimates_end_at_the_limit(monkeypatch):
    estimates = limited(monkeypatch, taught=-1)
    assert not estimates.learn(NOTHING)
    with pytest.raises(SolverError, match="`history` is empty"):
        estimates.model([])


@pytest.mark.parametrize("target", ["v5e:4", "v5p:2x2x1"])
def test_of_absent_tpus_the_same_programs_run_kernels_as_of_those_at_hand(target):
    """No step is traced to ask for a difference, which a plan would then tell of."""
    with backend_for(Target.parse(target)) as backend:
        estimates = Estimates(types.SimpleNamespace(backend=backend), MADE, shards=4)
        assert estimates.more_by_kernels(NOTHING) is None
    with backend_for(Target.parse("h200:4")) as backend:
        estimates = Estimates(types.SimpleNamespace(backend=backend), MADE, shards=4)
        with pytest.raises(AttributeError, match="trace"):
            estimates.more_by_kernels(NOTHING)

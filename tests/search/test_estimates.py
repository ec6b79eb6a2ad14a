"""Estimates teach the solver: it is asked again until what it answers is expected to fit. Small
changes, each judged by an estimate, find what the solver's sums do not.
"""

import itertools
import math
import types
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem._core.actions import KEEP, RECOMPUTE, UNTAGGED
from jaxmem._planner.search.estimates import MOST_EQUATIONS, MOST_ESTIMATES, Estimates, agreed
from jaxmem._planner.search.local_search import PATIENCE, local_search
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.memory import working_bytes
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem._planner.solve.solve import least_bytes, solve
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem.errors import SolverError
from tests.shared.profiles import chain, profile

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
    total = answer.saved_bytes + drawn(sizes)(answer.actions)
    if total > room:
        # Estimates did not help: all were used up, or the last two answers were the same.
        known = [stored(actions) for actions in estimates.asked]
        assert len(estimates.asked) > MOST_ESTIMATES or stored(answer.actions) in known
    # nothing is estimated twice
    different = {repr(stored(a)) for a in estimates.asked}
    assert len(estimates.asked) == len(different) <= MOST_ESTIMATES + 1


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
    found = [[e.estimate(a, "least") is not None for a in many] for e in (alone, after)]
    assert found == [[True, True, False]] * 2
    assert alone.estimate(many[0], "least") is not None, "it was made before the limit"


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


CHOICES = ActionProblem(MADE).open_choices()


def everything_priced():
    """Every assignment there is, with its price."""
    for chosen in itertools.product(*CHOICES.values()):
        actions = {"block": {tag: choice for (_, tag), choice in zip(CHOICES, chosen)}}
        yield ActionSolution.of(ActionProblem(MADE), actions)


ALL = {repr(sorted(s.actions["block"].items())): s for s in everything_priced()}


def of(sizes):
    """Bytes of an assignment: the larger of two peaks. Each choice changes both by drawn bytes."""

    def beside(actions) -> float:
        chosen = [
            CHOICES["block", tag].index(actions["block"].get(tag, RECOMPUTE)) for _, tag in CHOICES
        ]
        moments = (sum(s[m][c] for s, c in zip(sizes, chosen)) for m in (0, 1))
        return max(moments)

    return beside


def searched(beside, room, starts=(NOTHING,), **limits):
    return local_search(starts, ActionProblem(MADE, **limits), beside, room)


drawn_sizes = st.lists(
    st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), min_size=2, max_size=2),
    min_size=len(CHOICES),
    max_size=len(CHOICES),
)


@hypothesis.settings(max_examples=60, deadline=None)
@given(drawn_sizes, st.integers(0, 25))
def test_what_it_returns_is_no_worse_than_any_start_and_is_told_the_truth(sizes, room):
    beside = of(sizes)
    found = searched(beside, room)
    over = lambda s: max(0, beside(s.actions) - room)
    start = ActionSolution.of(ActionProblem(MADE), NOTHING)
    assert over(found) <= over(start)
    if over(start) == 0:
        assert found.risk_adjusted_seconds <= start.risk_adjusted_seconds
    # and it does so again: nothing is left to luck
    assert searched(beside, room) == found


def test_it_finds_the_optimum_of_a_small_step():
    """Two moments: one choice at a time gains nothing, as either moment stays the most."""
    first, second = [tag for _, tag in CHOICES][:2]

    def beside(actions) -> float:
        kept = {tag for tag, c in actions["block"].items() if c == KEEP}
        peak = max(10 - 4 * (name in kept) for name in (first, second))
        return peak + len(kept - {first, second})

    least = min(beside(s.actions) for s in ALL.values())
    assert least == 6
    found = searched(beside, 0)
    assert beside(found.actions) == least
    # with room for 10, the fastest of all is found
    fitting = [s.risk_adjusted_seconds for s in ALL.values() if beside(s.actions) <= 10]
    assert searched(beside, 10).risk_adjusted_seconds == pytest.approx(min(fitting))


def test_it_keeps_to_host_memory_and_to_what_xla_compiles():
    # What is moved to the host takes least on the device.
    beside = lambda a: sum(not c.action.offloads for c in a["block"].values())
    free = searched(beside, 0)
    assert free.host_bytes > 0
    assert searched(beside, 0, host_room=0).host_bytes == 0
    assert searched(beside, 0, excluded=(free.actions,)).actions != free.actions


def test_a_block_that_keeps_everything_is_changed_too():
    beside = lambda a: 10.0 if UNTAGGED in a["block"] else 5.0
    found = searched(beside, 5, [MADE.everything_kept])
    assert beside(found.actions) == 5
    assert math.isinf(found.gap), "nothing is proven"


def test_it_ends_when_walks_do_and_where_nothing_improves():
    asked = []

    def beside(actions):
        asked.append(actions)
        return 5.0 if len(asked) < 4 else None

    found = searched(beside, 0)
    assert found is not None
    assert len(asked) == 4
    assert searched(lambda _: None, 0) is None
    asked.clear()
    count = lambda actions: asked.append(actions) or 5.0
    searched(count, 0)
    # equal bytes are ranked by what moves to the host and by time, which end too
    assert len(asked) <= min(len(ALL), 4 * PATIENCE)
    assert len(asked) == len({repr(a) for a in asked})

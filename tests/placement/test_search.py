"""What a search asks of the program, against steps that only tell bytes."""

import types
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxmem._planner.placement.layer import LayerPolicy, Link, States
from jaxmem._planner.placement.program import PlacementProblem
from jaxmem._planner.placement.search import PlacementSearch
from jaxmem._planner.search.trial import Limits
from jaxmem.errors import StepError

MB = 1_000_000
STATES = States(6, 40 * MB, 80 * MB, 20 * MB, 0, 200 * MB)
POLICIES = (
    LayerPolicy({}, 10 * MB, 0, 2e-3, 6e-3, working={False: 50 * MB, True: 90 * MB}),
    LayerPolicy({"up": "keep"}, 90 * MB, 0, 2e-3, 4e-3, working={False: 20 * MB, True: 60 * MB}),
)

NO_PROFILE: Any = None


class Steps:
    """Steps that take what `told` says of an answer, and `more` once they are compiled."""

    def __init__(self, told, more=0, fails=()):
        self.told, self.more, self.fails, self.compiles = told, more, fails, 0

    def estimate(self, assignment, places):
        return self.told(assignment, places)

    def compile_fully(self, assignment, places):
        self.compiles += 1
        if self.compiles in self.fails:
            raise StepError("XLA could not compile the step")
        more = self.more(places) if callable(self.more) else self.more
        total = self.told(assignment, places) + more
        return types.SimpleNamespace(total=total, host_bytes=0)


def search(room, told, **steps):
    problem = PlacementProblem(STATES, POLICIES, Link(25e9, 25e9))
    block: Any = types.SimpleNamespace(name="block")
    most = 10**15 if room is None else room
    limits = Limits(most, most, 10**15)
    return PlacementSearch(Steps(told, **steps), NO_PROFILE, block, {}, problem, limits)


def sums(assignment, places):
    """What the program itself says of an answer."""
    kept = 0
    for label, choices in assignment.actions.items():
        start, stop = (0, 6) if label == "block" else map(int, label[6:-1].split(":"))
        kept += (stop - start) * POLICIES[bool(choices)].device_bytes
    policies = {bool(choices) for choices in assignment.actions.values()}
    work = max(POLICIES[w].working[places.persist < 6] for w in policies)
    held = places.persist * STATES.layer + places.copies * STATES.copy
    return STATES.fixed + held + places.buffers * STATES.parameters + kept + work


def is_least(assignment, places):
    return places.persist == places.copies == places.buffers == 0 and not any(
        assignment.actions.values()
    )


def test_an_answer_that_is_expected_to_fit_is_found_at_every_room_above_the_least():
    """Estimates say much more of every answer but the least."""
    told = lambda *a: sums(*a) + (0 if is_least(*a) else 900 * MB)
    least = search(None, told).least()
    floor = told(search(None, told).assignment(least), least.places)
    for room in range(floor, 3 * floor + 1000 * MB, 97 * MB):
        one = search(room, told)
        found = one.agreed()
        assert found is not None
        assert one.expected(found) <= room
    assert search(floor - MB, told).run() is None


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    st.lists(st.integers(0, 400), min_size=7, max_size=7),
    st.integers(500, 1500).map(lambda m: m * MB),
)
def test_whatever_compiles_take_more_a_plan_is_found_where_the_least_compiles(more, room):
    of_places = lambda places: more[places.persist] * MB + places.copies * more[0] * MB // 8
    one = search(room, sums, more=of_places)
    least = one.least()
    total = sums(one.assignment(least), least.places) + of_places(least.places)
    best = one.run()
    assert len(one.trials) <= 5
    if total <= room:
        assert best.total <= room


def test_one_answer_that_xla_does_not_compile_takes_nothing_from_those_before():
    with pytest.raises(StepError, match="XLA could not"):
        search(800 * MB, sums, fails=(1,)).run()
    # The first is over the room, as compiled, so that a second is asked for.
    one = search(800 * MB, sums, more=-100 * MB, fails=(2,))
    assert one.run() is one.trials[0]

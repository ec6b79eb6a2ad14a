"""Counts of layers against brute force over all of them, and transfers between devices against sums
by hand. A search over the program, against steps that have bytes alone.
"""

import dataclasses
import itertools
import types
from typing import Any

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem._model.states.places import DEVICE, DIVIDED, HOST
from jaxmem._planner.placement.layer import (
    GATHERED_BESIDE,
    ONE_DEVICE,
    PLACES,
    RESIDENT,
    STREAMED,
    LayerGroup,
    LayerPolicy,
    Link,
    Sharding,
    States,
    lanes_of,
)
from jaxmem._planner.placement.program import PlacementProblem, PlacementSolution, solve_placement
from jaxmem._planner.placement.search import PlacementSearch
from jaxmem._planner.search.trial import Limits
from jaxmem._planner.solve.cost import Cost
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem.errors import StepError

MB = 1_000_000
sizes = st.integers(0, 40)
seconds = st.integers(1, 50).map(lambda n: n * 1e-3)


def other_blocks(megabytes: int, hosted: int, seconds: float) -> ActionSolution:
    """An assignment of the blocks outside the layers, and its price."""
    cost = Cost(megabytes * MB, hosted * MB, seconds, 0.0, seconds / 8, ())
    return ActionSolution({}, cost, 0)


@st.composite
def problems(draw):
    backwards = draw(st.sampled_from([1, 2]))
    policies = [
        LayerPolicy(
            {},
            draw(sizes) * MB,
            draw(st.sampled_from([0, 0, 10])) * MB,
            draw(seconds),
            draw(seconds),
            draw(st.sampled_from([0.0, 1e-3])),
            {False: draw(sizes) * MB, True: draw(sizes) * MB},
            backwards,
        )
        for _ in range(draw(st.integers(1, 2)))
    ]
    states = States(
        layers=draw(st.integers(1, 5)),
        parameters=draw(st.integers(1, 20)) * MB,
        moments=draw(st.integers(1, 40)) * MB,
        copy=draw(st.integers(1, 10)) * MB,
        outside=draw(st.sampled_from([0, 15])) * MB,
        fixed=draw(sizes) * MB,
        wire=draw(sizes) * MB,
        outside_wire=draw(sizes) * MB,
        outside_stored=draw(sizes) * MB,
    )
    count = draw(st.integers(1, 3))
    others = [other_blocks(draw(sizes), draw(sizes), draw(seconds)) for _ in range(count)]
    divided = draw(st.sampled_from(DIVIDED))
    many = Sharding(divided, draw(st.sampled_from([2, 8])), 1e9)
    return PlacementProblem(
        states,
        policies,
        Link(draw(st.sampled_from([1e9, 20e9])), 5e9),
        draw(st.integers(1, 3)),
        others,
        room=draw(st.integers(0, 500)) * MB + MB // 2,
        host_room=draw(st.sampled_from([0, 100, 10_000])) * MB + MB // 2,
        most_groups=draw(st.integers(1, 3)),
        sharding=draw(st.sampled_from([ONE_DEVICE, many])),
        outer_moves=draw(st.booleans()),
    )


def all_solutions(problem):
    """Every way to count the layers that is allowed, priced by its definition."""
    layers, groups = problem.states.layers, problem.groups
    outers = [DEVICE, HOST] if problem.states.outside and problem.outer_moves else [DEVICE]
    for chosen in itertools.combinations_with_replacement(range(len(groups)), layers):
        counts = {groups[k]: chosen.count(k) for k in dict.fromkeys(chosen)}
        if len(counts) > problem.most_groups or (layers > 1 and 1 in counts.values()):
            continue
        for outer, others in itertools.product(outers, problem.others):
            found = PlacementSolution.of(problem, counts, outer, others)
            if found.device_bytes <= problem.room and found.host_bytes <= problem.host_room:
                yield found.seconds + doubt_of(problem, found), found


def doubt_of(problem, found) -> float:
    policies, times = problem.policies, problem.microbatches
    layers = sum(n * times * policies[k.policy].doubt_seconds for k, n in found.counts.items())
    return layers + found.others.cost.doubt_seconds


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_fastest_counts_are_found(problem):
    found, known = solve_placement(problem), [s for s, _ in all_solutions(problem)]
    if not known:
        assert found is None
        return
    assert found.device_bytes <= problem.room
    assert found.host_bytes <= problem.host_room
    assert found.risk_adjusted_seconds == pytest.approx(min(known), rel=1e-6)
    doubt = doubt_of(problem, found)
    assert found.risk_adjusted_seconds == pytest.approx(found.seconds + doubt, rel=1e-9)
    assert sum(found.counts.values()) == problem.states.layers == found.places.layers
    stops = [stop for _, stop, _ in found.ranges]
    assert [0, *stops[:-1]] == [start for start, *_ in found.ranges]
    assert stops[-1] == problem.states.layers


@settings(max_examples=25, deadline=None)
@given(problems())
def test_the_fewest_bytes_are_found(problem):
    unlimited = PlacementProblem(**{**vars(problem), "room": None})
    found = solve_placement(unlimited, "bytes")
    known = all_solutions(PlacementProblem(**{**vars(problem), "room": 10**15}))
    least = min((a.device_bytes for _, a in known), default=None)
    assert (found and found.device_bytes) == least


def problem(layers, room, **other):
    policies = (LayerPolicy({}, 10 * MB, 0, 2e-3, 4e-3, working={False: 5 * MB, True: 30 * MB}),)
    states = States(layers, 40 * MB, 80 * MB, 20 * MB, 0, 50 * MB)
    return PlacementProblem(states, policies, Link(25e9, 25e9), room=room, **other)


def test_more_room_is_never_slower_and_states_leave_the_device_last_of_all():
    found = [solve_placement(problem(96, gb * 1000 * MB)) for gb in (2, 4, 8, 16, 64)]
    times = [a.seconds for a in found]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    assert [a.places.persist for a in found] == sorted(a.places.persist for a in found)
    assert found[-1].places.persist == 96


def test_places_that_are_not_allowed_are_not_used():
    only = problem(8, 400 * MB, places=(RESIDENT, "streamed"))
    assert {k.place for k in solve_placement(only).counts} <= {RESIDENT, "streamed"}
    assert {k.place for k in only.groups} < set(PLACES)
    assert solve_placement(problem(8, 400 * MB, host_room=0)) is None


def test_a_layer_that_streams_takes_as_long_as_its_slowest_lane():
    """By hand: parameters take 1.6 ms to fetch, moments 3.2 ms, and as long to store."""
    asked = problem(4, None)
    assert asked.seconds(LayerGroup(RESIDENT, 0)) == pytest.approx(6e-3)
    # forward max(2, 1.6), backward max(4, 4.8), and 4.8 to store
    assert asked.seconds(LayerGroup("streamed", 0)) == pytest.approx((2 + 4.8 + 4.8) * 1e-3)
    # the backward fetches moments alone, hidden by its work
    assert asked.seconds(LayerGroup("buffered", 0)) == pytest.approx((2 + 4 + 4.8) * 1e-3)
    assert asked.seconds(LayerGroup("copied", 0)) == pytest.approx((2 + 4.8 + 4.8) * 1e-3)
    twice = problem(4, None, microbatches=2)
    # the first of two microbatches stores moments alone
    early = 2 + 4.8 + 3.2
    assert twice.seconds(LayerGroup("streamed", 0)) == pytest.approx((early + 2 + 4.8 + 4.8) * 1e-3)


def by_hand(place, microbatches, offloaded=0.0):
    """Milliseconds of one layer of a step that clips by the global norm, from a list of what each
    pass fetches and stores: 40 MB of parameters and 80 MB of moments at 25 GB/s each way, with
    2 ms of work in the forward and 4 ms in each backward.
    """
    parameters, moments = 1.6, 3.2
    here = {"streamed": {"p", "m"}, "buffered": {"m"}, "copied": {"m"}, RESIDENT: set()}[place]
    fetched = parameters * (place in ("streamed", "buffered"))
    forward = max(2, fetched, offloaded)
    norm = max(4, parameters * ("p" in here) + offloaded)
    early = max(4, parameters * ("p" in here) + moments * ("m" in here) + offloaded)
    # The update of a copy's master fetches the master.
    update = parameters * (place in ("streamed", "copied")) + moments * ("m" in here)
    last = max(4, update + offloaded)
    stored = 0 if place == RESIDENT else moments
    whole = 0 if place == RESIDENT else moments + parameters
    passes = microbatches * (forward + norm) + (microbatches - 1) * (early + stored)
    return passes + last + whole


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_clipping_by_the_norm_adds_a_backward_that_fetches_parameters_alone(place, microbatches):
    clipped = problem(4, None, microbatches=microbatches)
    plain = clipped.seconds(LayerGroup(place, 0))
    twice = tuple(dataclasses.replace(p, backwards=2) for p in clipped.policies)
    clipped = dataclasses.replace(clipped, policies=twice)
    found = clipped.lanes(LayerGroup(place, 0))
    assert found.seconds(microbatches) == pytest.approx(1e-3 * by_hand(place, microbatches))
    # 4 ms of work hide the 1.6 ms of the parameters, which every microbatch fetches once more.
    assert found.seconds(microbatches) - plain == pytest.approx(4e-3 * microbatches)
    assert found.norm.lanes["to_device"] == pytest.approx(1.6e-3 * (place == STREAMED))
    assert found.norm.lanes["stored"] == 0
    one = LayerPolicy({}, 0, 125 * MB, 2e-3, 4e-3, backwards=2)  # 5 ms each way
    found = lanes_of(one, place, clipped.states, clipped.link)
    expected = 1e-3 * by_hand(place, microbatches, offloaded=5.0)
    assert found.seconds(microbatches) == pytest.approx(expected)


# Two microbatches through 10 layers, of 40 MB of parameters each that cross as 20 MB.
WHOLE = States(10, 40 * MB, 80 * MB, 20 * MB, 200 * MB, 0, 20 * MB, 50 * MB, 100 * MB)
POLICY = LayerPolicy({}, 0, 0, 1.0, 2.0, working={False: 0, True: 0})
RATE = 1000 * MB
RING = 3 / 4 / RATE  # seconds a byte, among four


def seconds_of(sharding, place=RESIDENT):
    problem = PlacementProblem(WHOLE, (POLICY,), Link(1e15, 1e15), 2, sharding=sharding)
    return PlacementSolution.of(problem, {LayerGroup(place, 0): 10}, DEVICE).seconds


WORK = 2 * 10 * 3.0


def test_on_one_device_nothing_crosses():
    assert seconds_of(ONE_DEVICE) == pytest.approx(WORK)


@pytest.mark.parametrize(
    ("divided", "crossing"),
    [
        # All moments are reduced once: as if scattered and gathered.
        ("nothing", 2 * (10 * 80 + 200)),
        # Gradients are scattered in each microbatch, parameters gathered once, as they are stored.
        ("moments", 2 * (10 * 40 + 100) + 10 * 40 + 100),
        ("states", 2 * (10 * 20 + 50) + 10 * 20 + 50),
    ],
)
def test_what_crosses_beside_no_work_is_added_to_it(divided, crossing):
    found = seconds_of(Sharding(divided, 4, RATE))
    assert found == pytest.approx(WORK + crossing * MB * RING, rel=1e-6)


def test_other_optimizers_reduce_each_gradient_as_it_is_stored():
    found = seconds_of(Sharding("nothing", 4, RATE, accumulates=False))
    assert found == pytest.approx(WORK + 2 * 2 * (10 * 40 + 100) * MB * RING, rel=1e-6)


def test_where_nothing_runs_beside_work_all_that_crosses_is_waited_for():
    link = Link(1e9, 5e8, beside=False)
    policy = LayerPolicy({}, 0, 10 * MB, 1.0, 2.0)
    own = lanes_of(policy, STREAMED, WHOLE, link)
    # Parameters are fetched and 10 MB offloaded; then both states and the 10 MB are fetched, and
    # both states written back.
    assert own.forward.seconds == pytest.approx(1.0 + 0.040 + 0.020)
    assert own.last.seconds == pytest.approx(2.0 + 0.120 + 0.010 + 0.240)
    assert own.last.exposed == pytest.approx(own.last.seconds - 2.0)


def test_what_a_layer_gathers_is_hidden_by_its_work_but_for_the_first_weights():
    slow = Sharding("layers", 4, RATE / 200)  # 3 s to gather a layer
    gathered = 20 * MB * RING * 200
    found = lanes_of(POLICY, STREAMED, WHOLE, Link(1e15, 1e15), slow)
    first = (1 - GATHERED_BESIDE) * gathered
    assert found.forward.seconds == pytest.approx(max(1.0, GATHERED_BESIDE * gathered) + first)
    scattered = gathered
    assert found.backward.lanes["waited"] == pytest.approx(first + scattered)
    fast = Sharding("layers", 4, RATE * 200)
    assert (
        lanes_of(POLICY, STREAMED, WHOLE, Link(1e15, 1e15), fast).forward.lanes["collectives"] < 1.0
    )
    assert found.forward.exposed > 0


STATES = States(6, 40 * MB, 80 * MB, 20 * MB, 0, 200 * MB)
POLICIES = (
    LayerPolicy({}, 10 * MB, 0, 2e-3, 6e-3, working={False: 50 * MB, True: 90 * MB}),
    LayerPolicy({"up": "keep"}, 90 * MB, 0, 2e-3, 4e-3, working={False: 20 * MB, True: 60 * MB}),
)

NO_PROFILE: Any = types.SimpleNamespace(idle_blocks=())


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
    return PlacementSearch(Steps(told, **steps), NO_PROFILE, block, problem, limits)


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

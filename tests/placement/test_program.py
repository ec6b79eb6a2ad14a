"""Counts of layers against brute force over all of them."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem._model.states.places import DEVICE, DIVIDED, HOST
from jaxmem._planner.placement.lanes import Link
from jaxmem._planner.placement.layer import PLACES, RESIDENT, LayerGroup, LayerPolicy, States
from jaxmem._planner.placement.program import PlacementProblem, answer, priced
from jaxmem._planner.placement.sharding import ONE_DEVICE, Sharding

pytestmark = pytest.mark.core
MB = 1_000_000
sizes = st.integers(0, 40)
seconds = st.integers(1, 50).map(lambda n: n * 1e-3)


@st.composite
def questions(draw):
    ways = [
        LayerPolicy(
            {},
            draw(sizes) * MB,
            draw(st.sampled_from([0, 0, 10])) * MB,
            draw(seconds),
            draw(seconds),
            draw(st.sampled_from([0.0, 1e-3])),
            {False: draw(sizes) * MB, True: draw(sizes) * MB},
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
    divided = draw(st.sampled_from(DIVIDED))
    many = Sharding(divided, draw(st.sampled_from([2, 8])), 1e9)
    return PlacementProblem(
        states,
        ways,
        Link(draw(st.sampled_from([1e9, 20e9])), 5e9),
        draw(st.integers(1, 3)),
        room=draw(st.integers(0, 500)) * MB + MB // 2,
        host_room=draw(st.sampled_from([0, 100, 10_000])) * MB + MB // 2,
        kinds=draw(st.integers(1, 3)),
        sharding=draw(st.sampled_from([ONE_DEVICE, many])),
        outer_moves=draw(st.booleans()),
    )


def all_answers(question):
    """Every way to count the layers that is allowed, priced by its definition."""
    layers, kinds = question.states.layers, question.all_kinds
    outers = [DEVICE, HOST] if question.states.outside and question.outer_moves else [DEVICE]
    for chosen in itertools.combinations_with_replacement(range(len(kinds)), layers):
        counts = {kinds[k]: chosen.count(k) for k in dict.fromkeys(chosen)}
        if len(counts) > question.kinds or (layers > 1 and 1 in counts.values()):
            continue
        for outer in outers:
            found = priced(question, counts, outer)
            if found.device_bytes <= question.room and found.host_bytes <= question.host_room:
                yield found.seconds + doubt_of(question, counts), found


def doubt_of(question, counts) -> float:
    ways, times = question.ways, question.microbatches
    return sum(n * times * ways[k.way].doubt_seconds for k, n in counts.items())


@settings(max_examples=60, deadline=None)
@given(questions())
def test_the_fastest_counts_are_found(question):
    found, known = answer(question), [s for s, _ in all_answers(question)]
    if not known:
        assert found is None
        return
    assert found is not None
    assert found.device_bytes <= question.room
    assert found.host_bytes <= question.host_room
    assert found.cautious_seconds == pytest.approx(min(known), rel=1e-6)
    doubt = doubt_of(question, found.counts)
    assert found.cautious_seconds == pytest.approx(found.seconds + doubt, rel=1e-9)
    assert sum(found.counts.values()) == question.states.layers == found.places.layers
    stops = [stop for _, stop, _ in found.ways]
    assert [0, *stops[:-1]] == [start for start, *_ in found.ways]
    assert stops[-1] == question.states.layers


@settings(max_examples=25, deadline=None)
@given(questions())
def test_the_fewest_bytes_are_found(question):
    unlimited = PlacementProblem(**{**vars(question), "room": None})
    found = answer(unlimited, "bytes")
    known = all_answers(PlacementProblem(**{**vars(question), "room": 10**15}))
    least = min((a.device_bytes for _, a in known), default=None)
    assert (found and found.device_bytes) == least


def question(layers, room, **other):
    ways = (LayerPolicy({}, 10 * MB, 0, 2e-3, 4e-3, working={False: 5 * MB, True: 30 * MB}),)
    states = States(layers, 40 * MB, 80 * MB, 20 * MB, 0, 50 * MB)
    return PlacementProblem(states, ways, Link(25e9, 25e9), room=room, **other)


def test_more_room_is_never_slower_and_states_leave_the_device_last_of_all():
    found = [answer(question(96, gb * 1000 * MB)) for gb in (2, 4, 8, 16, 64)]
    times = [a.seconds for a in found]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    assert [a.places.persist for a in found] == sorted(a.places.persist for a in found)
    assert found[-1].places.persist == 96


def test_places_that_are_not_allowed_are_not_used():
    only = question(8, 400 * MB, places=(RESIDENT, "streamed"))
    assert {k.place for k in answer(only).counts} <= {RESIDENT, "streamed"}
    assert {k.place for k in only.all_kinds} < set(PLACES)
    assert answer(question(8, 400 * MB, host_room=0)) is None


def test_a_layer_that_streams_takes_as_long_as_its_slowest_lane():
    """By hand: parameters take 1.6 ms to fetch, moments 3.2 ms, and as long to store."""
    asked = question(4, None)
    assert asked.seconds(LayerGroup(RESIDENT, 0)) == pytest.approx(6e-3)
    # forward max(2, 1.6), backward max(4, 4.8), and 4.8 to store
    assert asked.seconds(LayerGroup("streamed", 0)) == pytest.approx((2 + 4.8 + 4.8) * 1e-3)
    # the backward fetches moments alone, hidden by its work
    assert asked.seconds(LayerGroup("buffered", 0)) == pytest.approx((2 + 4 + 4.8) * 1e-3)
    assert asked.seconds(LayerGroup("copied", 0)) == pytest.approx((2 + 4.8 + 4.8) * 1e-3)
    twice = question(4, None, microbatches=2)
    # the first of two microbatches stores moments alone
    early = 2 + 4.8 + 3.2
    assert twice.seconds(LayerGroup("streamed", 0)) == pytest.approx((early + 2 + 4.8 + 4.8) * 1e-3)


def test_moments_outside_the_layers_stay_where_they_may_not_move():
    ways = (LayerPolicy({}, 0, 0, 1e-3, 1e-3, working={False: 0, True: 0}),)
    states = States(1, MB, MB, MB, 15 * MB, 0)
    asked = PlacementProblem(states, ways, Link(1e9, 1e9), room=None, outer_moves=False)
    assert answer(asked, "bytes").outer == DEVICE
    moves = PlacementProblem(states, ways, Link(1e9, 1e9), room=None)
    assert answer(moves, "bytes").outer == HOST

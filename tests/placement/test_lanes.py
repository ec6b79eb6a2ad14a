"""The lanes of a timeline against a clock that ticks: every lane works off its own queue."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxmem._result.plan.timeline import LANES, WORK, Pass, PlacedLayers, Timeline

pytestmark = pytest.mark.core
ticks = st.integers(0, 5)
passes = st.builds(Pass.of_lanes, *(ticks for _ in LANES))
layers = st.builds(
    PlacedLayers, st.integers(1, 3), st.just("streamed"), ticks, ticks, passes, passes, passes
)


def ran(one: Pass) -> tuple[int, int]:
    """The ticks of a pass, and those of them in which no compute runs."""
    left = {lane: one.of(lane) for lane in LANES}
    total = idle = 0
    while any(left.values()):
        together = [lane for lane in LANES if lane.beside and left[lane]]
        alone = [lane for lane in LANES if not lane.beside and left[lane]]
        running = together or alone[:1]  # what does not overlap begins once all others have ended
        for lane in running:
            left[lane] -= 1
        total += 1
        idle += WORK not in running
    return total, idle


@given(st.lists(layers, min_size=1, max_size=4), st.integers(1, 3), ticks)
def test_a_timeline_takes_the_ticks_of_all_its_passes(groups, microbatches, alone):
    timeline = Timeline(microbatches, tuple(groups), alone, 0.0, 0, 0)
    order = [
        (one.last if last else one.backward)
        for last in (False,) * (microbatches - 1) + (True,)
        for one in groups
        for _ in range(one.count)
    ]
    order += [one.forward for one in groups for _ in range(one.count * microbatches)]
    total, idle = map(sum, zip(*map(ran, order)))
    assert timeline.layer_seconds == total
    assert timeline.exposed_seconds == idle + alone
    assert sum(timeline.exposed_by().values()) == pytest.approx(idle + alone)
    assert sum(one.seconds(microbatches) for one in groups) == total


@given(passes)
def test_where_nothing_overlaps_all_lanes_follow_each_other(one):
    total, idle = ran(one.in_turn())
    assert total == sum(one.of(lane) for lane in LANES)
    assert idle == total - one.of(WORK)


@given(passes, st.integers(0, 5))
def test_more_work_hides_more_and_never_exposes_more(one, more):
    slower = Pass(one.lanes | {"compute": one.of(WORK) + more})
    assert slower.exposed <= one.exposed
    assert slower.seconds >= one.seconds
    late = [one.of(lane) for lane in itertools.filterfalse(lambda lane: lane.beside, LANES)]
    assert one.exposed >= sum(late)

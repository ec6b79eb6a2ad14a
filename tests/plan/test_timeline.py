"""The timeline of a plan: its sums are the program's, its text and its figure are its numbers, and
a file holds it.
"""

import dataclasses
import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem
from jaxmem._model.states.places import DEVICE, DIVIDED, HOST, Places
from jaxmem._planner.outcome.placed import timeline_of
from jaxmem._planner.placement.layer import (
    ONE_DEVICE,
    PLACES,
    LayerGroup,
    LayerPolicy,
    Link,
    Sharding,
    States,
)
from jaxmem._planner.placement.program import PlacementProblem, PlacementSolution
from jaxmem._result.plan.timeline import LANES, WORK, Pass, PlacedLayers, Timeline
from jaxmem._result.plan.timeline_figure import CELLS, EXPOSED, panels, places
from jaxmem.errors import StepError
from tests.shared import plans
from tests.shared.timelines import OUTSIDE, timeline

MB = 1_000_000


@st.composite
def answers(draw):
    """Counts of any kinds, whether they fit or not."""
    seconds = st.integers(0, 50).map(lambda n: n * 1e-3)
    size = st.integers(0, 40).map(lambda n: n * MB)
    backwards = draw(st.sampled_from([1, 2]))
    policies = [
        LayerPolicy(
            *({}, draw(size), draw(size), draw(seconds), draw(seconds), 0.0),
            {False: 0, True: 0},
            backwards,
        )
        for _ in range(2)
    ]
    kinds = st.lists(
        st.tuples(st.sampled_from(PLACES), st.integers(0, 1)), min_size=1, max_size=4, unique=True
    )
    counts = {LayerGroup(*group): draw(st.integers(1, 60)) for group in draw(kinds)}
    states = States(sum(counts.values()), *(draw(size) for _ in range(7)))
    link = Link(draw(st.sampled_from([1e9, 25e9])), draw(st.sampled_from([2e9, 20e9])))
    many = Sharding(draw(st.sampled_from(DIVIDED)), 8, 1e9)
    sharding = draw(st.sampled_from([ONE_DEVICE, many]))
    asked = PlacementProblem(states, policies, link, draw(st.integers(1, 4)), sharding=sharding)
    return (
        asked,
        PlacementSolution.of(asked, counts, draw(st.sampled_from([DEVICE, HOST]))),
        draw(seconds),
    )


@settings(max_examples=60, deadline=None)
@given(answers())
def test_the_sums_are_those_of_the_program(found):
    asked, solution, outside = found
    made = timeline_of(asked, solution, outside)
    whole = solution.seconds + outside
    assert made.seconds == pytest.approx(whole, abs=1e-12)
    assert made.layer_seconds == pytest.approx(
        sum(n * asked.seconds(group) for group, n in solution.counts.items()), abs=1e-12
    )
    exposed = made.alone_seconds
    for group, n in solution.counts.items():
        runs = asked.lanes(group).runs(asked.microbatches)
        exposed += n * sum(one.exposed * count for one, count in runs)
    assert made.exposed_seconds == pytest.approx(exposed, abs=1e-12)
    assert sum(made.exposed_by().values()) == pytest.approx(exposed, abs=1e-12)
    # No second is exposed in which the layers compute.
    work = made.lane_seconds()[WORK.key]
    assert work + exposed + outside == pytest.approx(made.seconds, abs=1e-12)
    assert 0 <= made.exposed_share <= 1
    hosted = sum(group.count * group.host_bytes for group in made.groups)
    offloaded = sum(
        n * asked.policies[group.policy].host_bytes for group, n in solution.counts.items()
    )
    assert hosted + made.outer_host_bytes + offloaded == solution.host_bytes


@settings(max_examples=40, deadline=None)
@given(answers())
def test_marks_are_as_long_as_what_they_stand_for(found):
    made = timeline_of(*found)
    drawn = panels(made)
    if not made.layer_seconds:
        assert drawn == []
        return
    lengths = {}
    for panel, times in zip(drawn[::-1], (1, made.microbatches - 1)):  # the last one, then others
        for name, marks in panel.rows:
            widths = sum(float(w) for w in re.findall(r"h(-?[\d.]+)v1h-", marks))
            lengths[name] = lengths.get(name, 0.0) + times * widths
            boxes = re.findall(r"M([\d.]+) 0h([\d.]+)v1", marks)
            assert max((float(x) + float(width) for x, width in boxes), default=0) <= 100.01
    wanted = {lane.name: made.lane_seconds()[lane.key] for lane in LANES}
    wanted[EXPOSED] = made.exposed_seconds - made.alone_seconds
    # Both panels are on the scale of the longer one.
    longest = max(
        sum(
            g.count * (g.forward.seconds + getattr(g, back).seconds)
            + (0 if g.norm is None else g.count * g.norm.seconds)
            for g in made.groups
        )
        for back in (("last",) if made.microbatches == 1 else ("backward", "last"))
    )
    # Of four groups in three passes; each mark is rounded to a thousandth of a percent.
    marks = 3 * 4 * CELLS * made.microbatches
    for name, seconds in wanted.items():
        assert lengths.get(name, 0.0) == pytest.approx(100 * seconds / longest, abs=marks * 0.5e-3)


def test_by_hand():
    """Parameters of 40 MB and moments of 80 MB, at 25 GB/s to the device and 22 to the host."""
    made = timeline(each=2, microbatches=3, places=("resident", "streamed"))
    resident, streamed = made.groups
    assert resident.forward.lanes == pytest.approx(
        dict.fromkeys(("to_device", "stored", "collectives", "waited"), 0.0)
        | {"compute": 2e-3, "to_host": 20 / 22e3}
    )
    assert streamed.last.seconds == pytest.approx(120 / 25e3 + 120 / 22e3)
    assert {lane.name: s for lane, s in streamed.last.exposed_by().items()} == pytest.approx(
        {"to the device": 120 / 25e3 - 4e-3, "write-back": 120 / 22e3}
    )
    # One layer's parameters before the loops; the moments outside, three times both ways.
    assert made.alone_seconds == pytest.approx(40 / 25e3 + 3 * (60 / 25e3 + 60 / 22e3))
    assert made.outside_seconds == OUTSIDE
    assert (made.outer_device_bytes, made.outer_host_bytes) == (0, 60 * MB)
    assert [group.host_bytes for group in made.groups] == [0, 120 * MB]


def test_no_marks_where_times_cannot_be_drawn():
    made = timeline()
    idle, endless = Pass({}), Pass({"compute": 1e308})
    for one in (idle, endless):
        groups = [dataclasses.replace(g, forward=one, backward=one, last=one) for g in made.groups]
        again = dataclasses.replace(made, groups=tuple(groups))
        assert panels(again) == []
        assert plans.plan(lanes=again)._repr_html_()
    assert "layers 1 to 6, on the device: 114.4 MiB" in places(made)


PLAN = plans.plan(lanes=timeline(), places=Places(24, 6, 6, 6, HOST))


def test_a_file_holds_it_and_older_files_are_read(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    again = jaxmem.Plan.load(path)
    assert again == PLAN
    assert str(again.timeline()) == str(PLAN.timeline())
    data = json.loads(path.read_text())
    assert data["schema"] == 1
    del data["lanes"]
    path.write_text(json.dumps(data))
    older = jaxmem.Plan.load(path)
    assert older == dataclasses.replace(PLAN, lanes=None)
    with pytest.raises(StepError, match="since an older jaxmem wrote it; expected one"):
        older.timeline()
    with pytest.raises(StepError, match="since it places no states; expected one"):
        plans.plan().timeline()


ticks = st.integers(0, 5)
passes = st.builds(Pass.of_lanes, *(ticks for _ in LANES))
layers = st.builds(
    PlacedLayers, st.integers(1, 3), st.just("streamed"), ticks, ticks, passes, passes, passes
)


def ran(one: Pass) -> tuple[int, int]:
    """The ticks of a pass, and the ticks of the pass in which no compute runs."""
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

"""Live bytes as data and as a chart."""

import dataclasses

import pytest

from jaxmem._result.memory.chart import COLUMNS, KEY, ROWS, chart
from jaxmem._result.memory.live import Live, Phase, Series, phases
from tests.shared.explanations import MIB, made_explanation, made_live

pytestmark = pytest.mark.core

FORWARD, BACKWARD = "jit(f)/jvp()/dot_general", "jit(f)/transpose(jvp())/dot_general"


def words(ops, loops=None) -> list[tuple[str, bool, int, int]]:
    found = phases(ops, loops or [()] * len(ops))
    return [(p.name, p.loop, p.first, p.last) for p in found]


def test_phases_are_told_by_names_and_loops():
    ops = [FORWARD] * 10 + [BACKWARD] * 20 + ["jit(f)/sub"] * 10
    loops = [()] * 5 + [("l",)] * 5 + [("m",)] * 15 + [()] * 15
    assert words(ops, loops) == [
        ("forward", False, 0, 4),
        ("forward", True, 5, 9),
        ("backward", True, 10, 24),
        ("backward", False, 25, 29),
        ("outside the gradient", False, 30, 39),
    ]


def test_what_xla_moves_away_or_does_not_name_is_of_the_phase_around_it():
    ops = [BACKWARD, "", FORWARD, *[FORWARD] * 30, BACKWARD, *[FORWARD, ""] * 10, *[BACKWARD] * 40]
    # Where most neighbours are of the backward it begins, a point before its own first name.
    assert words(ops) == [("forward", False, 0, 52), ("backward", False, 53, 93)]


@pytest.mark.parametrize("ops", [[""], ["", ""], ["jit(f)"], [FORWARD], ["jit(f)/add"] * 3])
def test_phases_are_all_points(ops):
    found = phases(ops, [()] * len(ops))
    assert [p for phase in found for p in range(phase.first, phase.last + 1)] == [*range(len(ops))]


@pytest.mark.parametrize("count", [1, 7, 39, 40, 100])
def test_fewer_points_keep_the_peak(count):
    live = made_live()
    points = live.coarser(count)
    assert len(points) == min(count, live.points)
    assert points == sorted(points)
    assert live.peak in points


@pytest.mark.parametrize("points", [2, 3, 40, 65, 66, 67, 300])
def test_a_chart_has_eighty_columns_and_marks_the_peak(points):
    live = made_live(points)
    lines = chart(live, live.total_bytes)
    assert max(map(len, [*lines, KEY])) < 80
    assert len(lines) == ROWS + 3
    mark = lines[0].index("▼")
    column = "".join(line[mark : mark + 1] for line in lines[1 : ROWS + 1]).strip()
    columns = [
        "".join(line[i : i + 1] for line in lines[1 : ROWS + 1]).strip()
        for i in range(13, 13 + COLUMNS)
    ]
    assert len(column) == max(map(len, columns)), "the highest column is the marked one"
    assert "░" in lines[ROWS]
    assert "▒" in "".join(lines)


def test_charts_on_one_scale_are_compared():
    live, heights = made_live(), []
    for top in (live.total_bytes, 2 * live.total_bytes):
        lines = chart(live, top)
        heights.append(sum(any(c in "█▒" for c in line) for line in lines))
    assert heights[1] <= heights[0] // 2 + 1


def test_an_empty_step_is_drawn():
    live = Live(1, 0, (Series("other", "none", (0,)),), (Phase("forward", False, 0, 0),))
    assert len(chart(live, 0)) == ROWS + 3


def test_an_explanation_shows_both_programs_on_the_larger_scale():
    found = made_explanation(beside=True)
    assert found.beside is not None
    text = str(found)
    assert text.index("schedule, under the plan:") < text.index("schedule, everything kept:")
    top = f"{max(found.total_bytes, found.beside.total_bytes) / MIB:.1f} MiB ┤"
    assert text.count(top) == 2
    assert f"1.0 MiB of {found.total_bytes / MIB:.1f} MiB are free even at the peak" in text
    assert text.splitlines()[-1] == found.advice
    without = dataclasses.replace(found, live=None, beside=None)
    assert "schedule" not in str(without)

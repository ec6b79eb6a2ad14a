"""Live bytes as data and as a chart."""

import dataclasses

import pytest

from jaxmem._result.memory.live import phases
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

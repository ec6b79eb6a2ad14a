"""The curve of time against bytes: its steps, and what times are uncertain by."""

import re

import pytest

from jaxmem._result.plan.rows import Point
from jaxmem._train.report.curves import time_figure
from tests.shared.report_pages import MIB, made

pytestmark = pytest.mark.core


def drawn(*points: Point, css: str) -> list[tuple[float, float]]:
    """The corners of what is drawn in a class, in percent of the figure, y downwards."""
    html = time_figure(made(points=points))
    found = re.search(rf'<path class="{css}" d="([^"]*)"', html)
    assert found is not None, html
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)(?=[LZM]|$)", found[1])]


def test_uncertain_times_have_a_band_round_their_steps():
    points = [Point(i * MIB, t, {}, u) for i, t, u in ((60, 0.03, 0.004), (90, 0.02, 0.001))]
    line, band = drawn(*points, css="line s0"), drawn(*points, css="band s0")
    # the line: down from the top, a step, on to the edge; the band: there and back
    assert len(line) == 1 + 4
    assert len(band) == 2 * 4
    lower, upper = band[:4], band[4:][::-1]
    for (x, low), (other, high), (at, y) in zip(lower, upper, line[1:]):
        assert x == other == at
        assert high < y < low  # y runs downwards
        assert low - y == pytest.approx(y - high, abs=0.02)
    width = [low - high for (_, low), (_, high) in zip(lower, upper)]
    assert width[0] / width[-1] == pytest.approx(4, rel=0.01)


def test_certain_times_have_no_band():
    html = time_figure(made(points=(Point(60 * MIB, 0.03), Point(90 * MIB, 0.02))))
    assert "band" not in html
    assert "uncertain" not in html

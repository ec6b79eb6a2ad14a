"""The page about a frontier: its plot, its tables, and the compiled plans."""

import dataclasses
import re

import pytest

from jaxmem import plans
from jaxmem._result.frontier import Cell, Frontier
from jaxmem._result.svg import axis, bytes_axis, padded
from tests.shared.report_pages import HOSTILE, MIB, checked, made


def found(tokens: int | None = 100, **changes) -> Frontier:
    """Two sizes and three budgets. The smallest budget fits no size."""
    plan = lambda batch, budget, size, seconds: made(
        batch=batch, budget_bytes=budget * MIB, compiled_bytes=size * MIB, predicted_seconds=seconds
    )
    cells = (
        Cell(8, 10 * MIB, bytes=20 * MIB),
        Cell(8, 40 * MIB, bytes=30 * MIB, seconds=0.2, plan=plan(8, 40, 28, 0.16)),
        Cell(8, 80 * MIB, bytes=50 * MIB, seconds=0.1),
        Cell(16, 10 * MIB, bytes=60 * MIB),
        Cell(16, 40 * MIB, bytes=60 * MIB),
        Cell(16, 80 * MIB, bytes=70 * MIB, seconds=0.1, plan=plan(16, 80, 72, 0.128)),
    )
    return Frontier(cells, "h200", 100 * MIB, "xla", tokens, **changes)


def page_of(tmp_path, frontier: Frontier) -> str:
    path = tmp_path / "pages" / "frontier.html"
    plans.report_frontier(frontier, path)
    return checked(path)


def test_the_page_has_the_table_and_the_plans(tmp_path):
    text = page_of(tmp_path, found())
    for said in (
        "frontier for h200",
        "needs 20.0 MiB",
        "200.0 ms, 4,000/s, 30.0 MiB *",
        "100.0 ms, 16,000/s, 70.0 MiB *",
        "10.0 MiB: no size fits, the least needs 20.0 MiB",
        "compiled to 72.0 MiB (estimated 70.0 MiB), 128.0 ms a step (estimated 100.0 ms)",
        "125 examples/s, 12,500 tokens/s",
        "batch 8 in 40.0 MiB",
        "batch 16 in 80.0 MiB",
        "The plans",
    ):
        assert said in text


def test_the_page_of_a_frontier_without_a_plan_has_the_table(tmp_path):
    cells = Cell(8, 10 * MIB, bytes=20 * MIB), Cell(16, 10 * MIB, bytes=60 * MIB)
    text = page_of(tmp_path, Frontier(cells, "h200", 100 * MIB, "xla", None))
    assert "needs 20.0 MiB" in text
    assert "needs 60.0 MiB" in text
    assert "batch 8 in" not in text


def test_marks_are_at_the_cells_bytes_and_throughput(tmp_path):
    text, *_ = page_of(tmp_path, found()).split("The best size")
    # estimates, then the compiled plans: (bytes in MiB, tokens a second)
    expected = [(30, 4_000), (50, 8_000), (70, 16_000), (28, 5_000), (72, 12_500)]
    sizes = [size for size, _ in expected]
    x = bytes_axis(*padded(MIB * size for size in (*sizes, 10, 40, 80)))
    y = axis(*padded(rate for _, rate in expected))
    circles = re.findall(r'<circle class="dot (\w+)[^"]*" cx="([\d.]+)%" cy="([\d.]+)%"', text)
    places = [(float(cx), float(cy)) for _, cx, cy in circles]
    for size, rate in expected:
        at = (x.percent(size * MIB), 100 - y.percent(rate))
        assert any(place == pytest.approx(at, abs=0.01) for place in places), (size, rate)
    assert len(circles) == len(expected)
    looks = [look for look, *_ in circles]
    assert looks.count("chosen") == 2
    assert looks.count("hollow") == 3, "no cell dominates another"
    assert text.count('<line class="budget"') >= 3


def test_a_frontier_without_tokens_and_with_a_single_plan(tmp_path):
    alone = found(tokens=None)
    cells = tuple(dataclasses.replace(c, plan=None) if c.batch == 8 else c for c in alone.cells)
    text = page_of(tmp_path, dataclasses.replace(alone, cells=cells))
    assert "tokens" not in text.split("The best size")[0]
    assert "200.0 ms, 40.0/s, 30.0 MiB *" in text
    assert "40.0 MiB: no size fits, the least needs 30.0 MiB" in text


def test_hostile_names_are_escaped(tmp_path):
    text = page_of(tmp_path, dataclasses.replace(found(), target=HOSTILE))
    assert "<script>" not in text

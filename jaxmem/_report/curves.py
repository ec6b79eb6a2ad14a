"""Draws the page's curves: loss against step, and time against budget."""

import math
import statistics
from collections.abc import Iterable, Sequence

from jaxmem._core.bytes import show_bytes
from jaxmem._plan.plan import Plan
from jaxmem._report.svg import (
    Axis,
    axis,
    band,
    box,
    bytes_axis,
    chart,
    dot,
    escape,
    legend,
    line,
    padded,
    show_ms,
    upright,
)
from jaxmem._runs.read import Run

BUCKETS = 200  # of a loss curve of more than twice as many rows
SERIES = 6  # colours of lines in the stylesheet
MEAN, LEAST, GREATEST = 1, 2, 3  # indices in a point of a loss curve; 0 is its step


def loss_figure(runs: Sequence[Run]) -> str:
    """Loss against step, a line for each run, and its validation loss as a ring at the last step.
    Nothing where no run has a finite loss.
    """
    # The index of a run among all, not among those drawn, decides its colour.
    drawn = [
        (run, i) for i, run in enumerate(runs) if any(math.isfinite(loss) for _, loss in run.losses)
    ]
    if not drawn:
        return ""
    finite = [point for run, _ in drawn for point in run.losses if math.isfinite(point[1])]
    ends = [
        (run, i, max(step for step, _ in run.losses), value)
        for run, i in drawn
        if (value := run.number("val_loss")) is not None
    ]
    x = axis(
        min(step for step, _ in finite), max(step for run, _ in drawn for step, _ in run.losses)
    )
    y = axis(*padded([loss for _, loss in finite] + [value for *_, value in ends]))
    marks = [_curve(run, _series(i), x, y) for run, i in drawn]
    for run, i, step, value in ends:
        title = f"{run.name}: validation loss {value:.4f}"
        marks.append(dot(x.percent(step), y.percent(value), f"hollow {_series(i)}", title))
    key = (
        [(f'<i class="key {_series(i)}"></i>', run.name) for run, i in drawn]
        if len(runs) > 1
        else []
    )
    key += [('<i class="key ring"></i>', "validation loss at the end")] if ends else []
    figure = chart(
        x,
        y,
        "".join(marks),
        name="Training loss against step",
        x_title="step",
        y_title="training loss",
    )
    return (
        figure
        + legend(key)
        + "".join(f'<p class="fine">{escape(text)}</p>' for text in _told(run for run, _ in drawn))
    )


def _curve(run: Run, css: str, x: Axis, y: Axis) -> str:
    """A run's line; under one of buckets lies a shade from their least to their greatest loss."""
    pieces = _pieces(run.losses)
    across = lambda which: [
        [(x.percent(p[0]), y.percent(p[which])) for p in piece] for piece in pieces
    ]
    if len(pieces) == len(pieces[0]) == 1:
        return dot(*across(MEAN)[0][0], css, run.name)
    shade = band(zip(across(LEAST), across(GREATEST)), css) if len(run.losses) > 2 * BUCKETS else ""
    return shade + line(across(MEAN), css)


def time_figure(plan: Plan) -> str:
    """The least predicted step time at each budget, with the plan, everything kept and the budget
    marked.
    """
    points = sorted(plan.pareto(), key=lambda p: p.bytes)
    if not points:
        return "<p>The plan's file holds no curve.</p>"
    marked = [
        (plan.compiled_bytes, plan.predicted_seconds, "chosen", "this plan, as compiled"),
        (plan.baseline_bytes, plan.baseline_seconds, "hollow", "everything kept"),
    ]
    sizes = [p.bytes for p in points] + [size for size, *_ in marked]
    near = plan.budget_bytes <= 1.5 * max(sizes)
    x = bytes_axis(*padded([*sizes, *([plan.budget_bytes] if near else [])]))
    y = axis(
        *padded(
            1e3 * s for s in [*(p.seconds for p in points), *(seconds for _, seconds, *_ in marked)]
        )
    )
    # A staircase: between two points a budget allows the plan of the lower one. It comes down from
    # the top at the least bytes, and runs on to the right edge.
    steps = [(x.percent(points[0].bytes), 100.0)]
    for p in points:
        steps += [
            (x.percent(p.bytes), steps[-1][1]),
            (x.percent(p.bytes), y.percent(1e3 * p.seconds)),
        ]
    steps.append((100.0, steps[-1][1]))
    marks = box(
        0,
        steps[0][0],
        "nothing",
        f"no plan is predicted to take less than {show_bytes(points[0].bytes)}",
    )
    marks += upright(x.percent(plan.budget_bytes), "budget", "budget") if near else ""
    marks += line([steps], "s0")
    for size, seconds, css, text in reversed(marked):  # the plan's dot lies on top
        title = f"{text}: {show_bytes(size)}, {show_ms(1e3 * seconds)}"
        marks += dot(x.percent(size), y.percent(1e3 * seconds), css, title)
    budget = f"budget: {show_bytes(plan.budget_bytes)}" + ("" if near else ", beyond the scale")
    key = [
        ('<i class="key s0"></i>', "least predicted step time"),
        ('<i class="key budget"></i>', budget),
    ]
    key += [
        (
            f'<i class="key {"disc" if css == "chosen" else "ring"}"></i>',
            f"{text}: {show_bytes(size)}, {show_ms(1e3 * s)}",
        )
        for size, s, css, text in marked
    ]
    key.append(
        (
            '<i class="key block nothing"></i>',
            f"below {show_bytes(points[0].bytes)}: no plan is predicted to fit",
        )
    )
    name = "Least predicted step time against bytes on the device"
    return chart(
        x, y, marks, name=name, x_title="bytes on the device", y_title="step, ms"
    ) + legend(key)


def _series(i: int) -> str:
    """The CSS class of the i-th line: every second round through the colours is dashed."""
    return f"s{i % SERIES}" + (" dashed" if i // SERIES % 2 else "")


def _pieces(losses: Sequence[tuple[float, float]]) -> list[list[tuple[float, ...]]]:
    """Divides a curve into unbroken pieces. A point is (step, mean, least and greatest loss) of one
    row or, where there are many rows, of a bucket of them.

    A bucket without a finite loss breaks the line.
    """
    buckets = BUCKETS if len(losses) > 2 * BUCKETS else len(losses)
    made: list[list[tuple[float, ...]]] = [[]]
    for b in range(buckets):
        rows = losses[len(losses) * b // buckets : len(losses) * (b + 1) // buckets]
        finite = [row for row in rows if math.isfinite(row[1])]
        if finite:
            values = [loss for _, loss in finite]
            step = statistics.fmean(step for step, _ in finite)
            made[-1].append((step, statistics.fmean(values), min(values), max(values)))
        elif made[-1]:
            made.append([])
    return [piece for piece in made if piece]


def _told(runs: Iterable[Run]) -> Iterable[str]:
    """Sentences about what the curves do not show: rows in buckets, and rows left out."""
    runs = list(runs)
    if many := [
        f"{run.name} ({len(run.losses):,})" for run in runs if len(run.losses) > 2 * BUCKETS
    ]:
        yield (
            f"Of more than {2 * BUCKETS} rows, each of {BUCKETS} equal ranges is drawn: the line is"
            " its mean, the shade"
            f" reaches from its least to its greatest loss. Rows of {', '.join(many)}."
        )
    for run in runs:
        if missing := sum(not math.isfinite(loss) for _, loss in run.losses):
            left_out = f"{missing:,} of {len(run.losses):,}"
            yield f"{run.name}: rows without a finite loss are left out: {left_out}."

"""Draws numbers against the step: the training loss, and the measured seconds of a step."""

import math
import statistics
from collections.abc import Iterable, Sequence

from jaxmem._train.report.svg import (
    Axis,
    across,
    axis,
    band,
    chart,
    dot,
    escape,
    legend,
    line,
    padded,
    show_ms,
)
from jaxmem._train.runs.read import Course, Run

BUCKETS = 200  # of a course of more than twice as many rows
SERIES = 6  # colours of lines in the stylesheet
MEAN, LEAST, GREATEST = 1, 2, 3  # indices in a point of a course; 0 is its step
_TOP = 3  # medians: longer steps are cut off


def loss_figure(runs: Sequence[Run]) -> str:
    """Loss against step, a line for each run, and its validation loss as a ring at the last step.
    Nothing where no run has a finite loss.
    """
    drawn = _drawn(runs, [run.losses for run in runs])
    if not drawn:
        return ""
    ends = [
        (run, css, max(step for step, _ in course), value)
        for run, css, course in drawn
        if (value := run.number("val_loss")) is not None
    ]
    x = _steps(drawn)
    y = axis(*padded([*_finite(drawn), *(value for *_, value in ends)]))
    marks = [_curve(run.name, course, css, x, y) for run, css, course in drawn]
    for run, css, step, value in ends:
        title = f"{run.name}: validation loss {value:.4f}"
        marks.append(dot(x.percent(step), y.percent(value), f"hollow {css}", title))
    key = _key(drawn) if len(runs) > 1 else []
    key += [('<i class="key ring"></i>', "validation loss at the end")] if ends else []
    name, y_title = "Training loss against step", "training loss"
    figure = chart(x, y, "".join(marks), name=name, x_title="step", y_title=y_title)
    missing = [
        f"{run.name}: rows without a finite loss are left out: {gone:,} of {len(course):,}."
        for run, _, course in drawn
        if (gone := sum(not math.isfinite(loss) for _, loss in course))
    ]
    return figure + legend(key) + _told([*_of_buckets(drawn, "loss"), *missing])


def pace_figure(runs: Sequence[Run]) -> str:
    """Measured time of a step against the step, a line for each run; of a single run with a plan
    for the device at hand, what was predicted too. Nothing where no run has times.
    """
    drawn = _drawn(runs, [tuple((step, 1e3 * s) for step, s in run.paces) for run in runs])
    if not drawn:
        return ""
    plan = runs[0].plan if len(runs) == 1 else None
    predicted = 1e3 * plan.predicted_seconds if plan and plan.target == "local" else None
    medians = [statistics.median(ms for _, ms in course) for _, _, course in drawn]
    most = min(_TOP * max(medians), max(_finite(drawn)))
    x, y = _steps(drawn), axis(0, 1.06 * max(most, predicted or 0))
    marks = [_curve(run.name, course, css, x, y) for run, css, course in drawn]
    key = _key(drawn) if len(runs) > 1 else [(f'<i class="key {drawn[0][1]}"></i>', "measured")]
    if predicted is not None:
        said = f"predicted: {show_ms(predicted)}"
        marks.append(across(y.percent(predicted), "predicted", said))
        key.append(('<i class="key predicted"></i>', said))
    name, y_title = "Measured time of a step", "step, ms"
    figure = chart(x, y, "".join(marks), name=name, x_title="step", y_title=y_title)
    cut = [
        f"{run.name}: steps of more than {show_ms(y.high)} are cut off: {gone:,} of"
        f" {len(course):,}, the longest of {show_ms(max(ms for _, ms in course))}."
        for run, _, course in drawn
        if (gone := sum(ms > y.high for _, ms in course))
    ]
    return figure + legend(key) + _told([*_of_buckets(drawn, "time"), *cut])


Drawn = Sequence[tuple[Run, str, Course]]  # a run, the CSS class of its line, its numbers


def _drawn(runs: Sequence[Run], courses: Sequence[Course]) -> Drawn:
    """Runs with a finite number. The index of a run among all, not among these, decides its
    colour.
    """
    return [
        (run, _series(i), course)
        for i, (run, course) in enumerate(zip(runs, courses))
        if any(math.isfinite(value) for _, value in course)
    ]


def _finite(drawn: Drawn) -> list[float]:
    return [value for *_, course in drawn for _, value in course if math.isfinite(value)]


def _steps(drawn: Drawn) -> Axis:
    finite = [step for *_, course in drawn for step, value in course if math.isfinite(value)]
    return axis(min(finite), max(step for *_, course in drawn for step, _ in course))


def _key(drawn: Drawn) -> list[tuple[str, str]]:
    return [(f'<i class="key {css}"></i>', run.name) for run, css, _ in drawn]


def _curve(name: str, course: Course, css: str, x: Axis, y: Axis) -> str:
    """A run's line; under one of buckets lies a shade from their least to their greatest number."""
    pieces = _pieces(course)
    points = lambda which: [
        [(x.percent(p[0]), y.percent(p[which])) for p in piece] for piece in pieces
    ]
    if len(pieces) == len(pieces[0]) == 1:
        return dot(*points(MEAN)[0][0], css, name)
    shade = band(zip(points(LEAST), points(GREATEST)), css) if len(course) > 2 * BUCKETS else ""
    return shade + line(points(MEAN), css)


def _series(i: int) -> str:
    """The CSS class of the i-th line: every second round through the colours is dashed."""
    return f"s{i % SERIES}" + (" dashed" if i // SERIES % 2 else "")


def _pieces(course: Course) -> list[list[tuple[float, ...]]]:
    """Divides a curve into unbroken pieces. A point is (step, mean, least and greatest number) of
    one row or, where there are many rows, of a bucket of them.

    A bucket without a finite number breaks the line.
    """
    buckets = BUCKETS if len(course) > 2 * BUCKETS else len(course)
    made: list[list[tuple[float, ...]]] = [[]]
    for b in range(buckets):
        rows = course[len(course) * b // buckets : len(course) * (b + 1) // buckets]
        finite = [row for row in rows if math.isfinite(row[1])]
        if finite:
            values = [value for _, value in finite]
            step = statistics.fmean(step for step, _ in finite)
            made[-1].append((step, statistics.fmean(values), min(values), max(values)))
        elif made[-1]:
            made.append([])
    return [piece for piece in made if piece]


def _of_buckets(drawn: Drawn, what: str) -> list[str]:
    """A sentence about rows that are drawn in buckets."""
    many = [
        f"{run.name} ({len(course):,})" for run, _, course in drawn if len(course) > 2 * BUCKETS
    ]
    if not many:
        return []
    return [
        f"Of more than {2 * BUCKETS} rows, each of {BUCKETS} equal ranges is drawn: the line is its"
        f" mean, the shade reaches from its least to its greatest {what}. Rows of"
        f" {', '.join(many)}."
    ]


def _told(sentences: Iterable[str]) -> str:
    return "".join(f'<p class="fine">{escape(text)}</p>' for text in sentences)

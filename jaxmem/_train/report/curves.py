"""Draws curves: the training loss and the measured seconds against the step, and the least
predicted time against the budget.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

from jaxmem._core.actions import EVERYTHING_KEPT
from jaxmem._core.bytes import show_bytes
from jaxmem._result import svg
from jaxmem._result.plan.plan import Plan
from jaxmem._train.runs.run import Course, Run

BUCKETS = 200  # of a course of more than twice as many rows
SERIES = 6  # colours of lines in the stylesheet
MEAN, LEAST, GREATEST = 1, 2, 3  # indices in a point of a course; 0 is its step
_TOP = 3  # medians: longer steps are cut off
Drawn = Sequence[tuple[Run, str, Course]]  # a run, the CSS class of its line, its numbers


def loss_figure(runs: Sequence[Run]) -> str:
    """Loss against step, with a line for each run, and its validation loss as a ring at the last
    step. Empty if no run has a finite loss.
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
    y = svg.axis(*svg.padded([*_finite(drawn), *(value for *_, value in ends)]))
    marks = [_curve(run.name, course, css, x, y) for run, css, course in drawn]
    for run, css, step, value in ends:
        title = f"{run.name}: validation loss {value:.4f}"
        marks.append(svg.dot(x.percent(step), y.percent(value), f"hollow {css}", title))
    signs = [(svg.key(css), run.name) for run, css, _ in drawn] if len(runs) > 1 else []
    signs += [(svg.key("ring"), "validation loss at the end")] if ends else []
    name, y_title = "Training loss against step", "training loss"
    figure = svg.chart(x, y, marks, name=name, x_title="step", y_title=y_title)
    missing = [
        f"{run.name}: rows without a finite loss are left out: {gone:,} of {len(course):,}."
        for run, _, course in drawn
        if (gone := sum(not math.isfinite(loss) for _, loss in course))
    ]
    return figure + svg.legend(signs) + svg.fine([*_of_buckets(drawn, "loss"), *missing])


def pace_figure(runs: Sequence[Run]) -> str:
    """Measured time of a step against the step, with a line for each run. For a single run with a
    plan for the local device, the predicted time too. Empty if no run has times.
    """
    drawn = _drawn(runs, [tuple((step, 1e3 * s) for step, s in run.paces) for run in runs])
    if not drawn:
        return ""
    plan = runs[0].plan if len(runs) == 1 else None
    predicted = 1e3 * plan.predicted_seconds if plan and plan.target == "local" else None
    medians = [statistics.median(ms for _, ms in course) for _, _, course in drawn]
    most = min(_TOP * max(medians), max(_finite(drawn)))
    x, y = _steps(drawn), svg.axis(0, 1.06 * max(most, predicted or 0))
    marks = [_curve(run.name, course, css, x, y) for run, css, course in drawn]
    name = lambda run: run.name if len(runs) > 1 else "measured"
    signs = [(svg.key(css), name(run)) for run, css, _ in drawn]
    if predicted is not None:
        said = f"predicted: {svg.show_ms(predicted)}"
        marks.append(svg.across(y.percent(predicted), "predicted", said))
        signs.append((svg.key("predicted"), said))
    title, y_title = "Measured time of a step", "step, ms"
    figure = svg.chart(x, y, marks, name=title, x_title="step", y_title=y_title)
    cut = [
        f"{run.name}: steps of more than {svg.show_ms(y.high)} are cut off: {gone:,} of"
        f" {len(course):,}, the longest of {svg.show_ms(max(ms for _, ms in course))}."
        for run, _, course in drawn
        if (gone := sum(ms > y.high for _, ms in course))
    ]
    return figure + svg.legend(signs) + svg.fine([*_of_buckets(drawn, "time"), *cut])


def _drawn(runs: Sequence[Run], courses: Sequence[Course]) -> Drawn:
    """Runs with a finite number. The index of a run among all, not among these, decides its
    colour: every second round through the colours is dashed.
    """
    return [
        (run, series(i), course)
        for i, (run, course) in enumerate(zip(runs, courses))
        if any(math.isfinite(value) for _, value in course)
    ]


def series(index: int) -> str:
    """The CSS class of a line among several."""
    return f"s{index % SERIES}" + (" dashed" if index // SERIES % 2 else "")


def _finite(drawn: Drawn) -> list[float]:
    """The finite numbers of all runs."""
    return [value for *_, course in drawn for _, value in course if math.isfinite(value)]


def _steps(drawn: Drawn) -> svg.Axis:
    """The axis of steps, over all runs."""
    finite = [step for *_, course in drawn for step, value in course if math.isfinite(value)]
    return svg.axis(min(finite), max(step for *_, course in drawn for step, _ in course))


def _curve(name: str, course: Course, css: str, x: svg.Axis, y: svg.Axis) -> str:
    """The line of a run. A line of buckets has a band from the least to the greatest number of each
    bucket.
    """
    pieces = _pieces(course)
    points = lambda which: [
        [(x.percent(p[0]), y.percent(p[which])) for p in piece] for piece in pieces
    ]
    if len(pieces) == len(pieces[0]) == 1:
        return svg.dot(*points(MEAN)[0][0], css, name)
    shade = svg.band(zip(points(LEAST), points(GREATEST)), css) if len(course) > 2 * BUCKETS else ""
    return shade + svg.line(points(MEAN), css)


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
    """A sentence about the runs whose rows are drawn in buckets."""
    many = [f"{run.name} ({len(rows):,})" for run, _, rows in drawn if len(rows) > 2 * BUCKETS]
    if not many:
        return []
    return [
        f"Of more than {2 * BUCKETS} rows, each of {BUCKETS} equal ranges is drawn: the line is its"
        f" mean, the shade reaches from its least to its greatest {what}. Rows of"
        f" {', '.join(many)}."
    ]


def time_figure(plan: Plan) -> str:
    """The least predicted step time at each budget. The plan, everything kept, the step as written
    and the budget are marked.
    """
    points = sorted(plan.pareto(), key=lambda p: p.bytes)
    if not points:
        return "<p>The plan's file holds no curve.</p>"
    marked = [
        (plan.compiled_bytes, plan.predicted_seconds, "chosen", "this plan, as compiled"),
        (plan.baseline_bytes, plan.baseline_seconds, "hollow", EVERYTHING_KEPT),
    ]
    if plan.written is not None and not plan.as_written:
        marked.append((plan.written.bytes, plan.written.seconds, "hollow", "as written"))
    sizes = [p.bytes for p in points] + [size for size, *_ in marked]
    near = svg.near_scale(plan.budget_bytes, max(sizes)) is not None
    x = svg.bytes_axis(*svg.padded([*sizes, *([plan.budget_bytes] if near else [])]))
    edge = lambda p, sign: 1e3 * (p.seconds + sign * p.uncertain_seconds)
    edges = [edge(p, sign) for p in points for sign in (-1, 1)]
    y = svg.axis(*svg.padded([*edges, *(1e3 * seconds for _, seconds, *_ in marked)]))
    stairs = lambda sign: _stairs((x.percent(p.bytes), y.percent(edge(p, sign))) for p in points)
    # The curve begins at the top, above the least bytes, and ends at the right edge.
    steps = [(x.percent(points[0].bytes), 100.0), *stairs(0)]
    least = show_bytes(points[0].bytes)
    marks = [svg.box(0, steps[0][0], "nothing", f"no plan is predicted to take less than {least}")]
    marks += [svg.upright(x.percent(plan.budget_bytes), "budget", "budget")] if near else []
    # The error bound of the times, as a staircase on each side of the curve.
    uncertain = any(p.uncertain_seconds for p in points)
    marks += [svg.band([(stairs(-1), stairs(1))], "s0")] if uncertain else []
    marks.append(svg.line([steps], "s0"))
    told = []
    for size, seconds, css, text in marked:
        said = f"{text}: {show_bytes(size)}, {svg.show_ms(1e3 * seconds)}"
        told.append((svg.dot(x.percent(size), y.percent(1e3 * seconds), css, said), css, said))
    marks += [mark for mark, *_ in reversed(told)]  # the plan's dot is drawn last
    budget = f"budget: {show_bytes(plan.budget_bytes)}" + ("" if near else ", beyond the scale")
    signs = [(svg.key("s0"), "least predicted step time"), (svg.key("budget"), budget)]
    signs += [(svg.key("block s0 faint"), "what the time is uncertain by")] if uncertain else []
    signs += [(svg.key("disc" if css == "chosen" else "ring"), said) for _, css, said in told]
    signs.append((svg.key("block nothing"), f"below {least}: no plan is predicted to fit"))
    name = "Least predicted step time against bytes on the device"
    figure = svg.chart(x, y, marks, name=name, x_title="bytes on the device", y_title="step, ms")
    return figure + svg.legend(signs)


def _stairs(corners: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """A line that keeps each height until the next corner, and the last one to the right edge.
    Between two points of the curve, a budget allows the plan with fewer bytes.
    """
    found: list[tuple[float, float]] = []
    for x, y in corners:
        found += [(x, found[-1][1]), (x, y)] if found else [(x, y)]
    return [*found, (100.0, found[-1][1])]

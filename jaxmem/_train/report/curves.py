"""Draws the least predicted time against the budget."""

from collections.abc import Iterable

from jaxmem._core.bytes import show_bytes
from jaxmem._result.plan.plan import Plan
from jaxmem._train.report.svg import (
    axis,
    band,
    box,
    bytes_axis,
    chart,
    dot,
    legend,
    line,
    padded,
    show_ms,
    upright,
)


def time_figure(plan: Plan) -> str:
    """The least predicted step time at each budget, with the plan, everything kept, the step as
    written and the budget marked.
    """
    points = sorted(plan.pareto(), key=lambda p: p.bytes)
    if not points:
        return "<p>The plan's file holds no curve.</p>"
    marked = [
        (plan.compiled_bytes, plan.predicted_seconds, "chosen", "this plan, as compiled"),
        (plan.baseline_bytes, plan.baseline_seconds, "hollow", "everything kept"),
    ]
    if plan.written is not None and not plan.as_written:
        marked.append((plan.written.bytes, plan.written.seconds, "hollow", "as written"))
    sizes = [p.bytes for p in points] + [size for size, *_ in marked]
    near = plan.budget_bytes <= 1.5 * max(sizes)
    x = bytes_axis(*padded([*sizes, *([plan.budget_bytes] if near else [])]))
    y = axis(
        *padded(
            1e3 * s
            for s in [
                *(p.seconds + sign * p.uncertain_seconds for p in points for sign in (-1, 1)),
                *(seconds for _, seconds, *_ in marked),
            ]
        )
    )
    # A staircase: between two points a budget allows the plan of the lower one. It comes down from
    # the top at the least bytes, and runs on to the right edge.
    corners = [(x.percent(p.bytes), y.percent(1e3 * p.seconds)) for p in points]
    steps = [(corners[0][0], 100.0), *_stairs(corners)]
    marks = box(
        0,
        steps[0][0],
        "nothing",
        f"no plan is predicted to take less than {show_bytes(points[0].bytes)}",
    )
    marks += upright(x.percent(plan.budget_bytes), "budget", "budget") if near else ""
    # What times are uncertain by, as a staircase on each side of it.
    lower, upper = (
        _stairs(
            (x.percent(p.bytes), y.percent(1e3 * (p.seconds + sign * p.uncertain_seconds)))
            for p in points
        )
        for sign in (-1, 1)
    )
    uncertain = any(p.uncertain_seconds for p in points)
    marks += band([(lower, upper)], "s0") if uncertain else ""
    marks += line([steps], "s0")
    for size, seconds, css, text in reversed(marked):  # the plan's dot lies on top
        title = f"{text}: {show_bytes(size)}, {show_ms(1e3 * seconds)}"
        marks += dot(x.percent(size), y.percent(1e3 * seconds), css, title)
    budget = f"budget: {show_bytes(plan.budget_bytes)}" + ("" if near else ", beyond the scale")
    key = [
        ('<i class="key s0"></i>', "least predicted step time"),
        ('<i class="key budget"></i>', budget),
    ]
    if uncertain:
        key.append(('<i class="key block s0 faint"></i>', "what the time is uncertain by"))
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


def _stairs(corners: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """A line that keeps each height until the next corner, and the last one to the right edge."""
    found: list[tuple[float, float]] = []
    for x, y in corners:
        found += [(x, found[-1][1]), (x, y)] if found else [(x, y)]
    return [*found, (100.0, found[-1][1])]

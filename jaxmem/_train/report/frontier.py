"""Draws a frontier: the throughput against bytes for each size of the batch, and the table."""

from jaxmem._core.bytes import show_bytes
from jaxmem._result import svg
from jaxmem._result.frontier import Frontier
from jaxmem._train.report.curves import series


def frontier_figure(frontier: Frontier) -> str:
    """The throughput against the bytes of the step. Estimates are dots, with a line for each size;
    estimates of `Frontier.pareto` are rings. Compiled plans are discs. Empty if no size fits any
    budget.
    """
    cells = [cell for cell in frontier.cells if cell.throughput]
    plans = [(cell, cell.plan) for cell in frontier.cells if cell.plan is not None]
    sizes = [cell.bytes for cell in cells] + [plan.compiled_bytes for _, plan in plans]
    if not sizes:
        return ""
    rates = [c.throughput for c in cells] + [c.compiled_throughput for c, _ in plans]
    budgets = [b for b in frontier.budgets if svg.near_scale(b, max(sizes)) is not None]
    x, y = (
        svg.bytes_axis(*svg.padded([*sizes, *budgets])),
        svg.axis(*svg.padded(map(frontier.rate, rates))),
    )

    def mark(css: str, batch: int, size: int, throughput: float) -> str:
        said = f"batch {batch}: {show_bytes(size)}, {frontier.rates(throughput)}"
        return svg.dot(x.percent(size), y.percent(frontier.rate(throughput)), css, said)

    marks = [svg.upright(x.percent(b), "budget", f"budget: {show_bytes(b)}") for b in budgets]
    pareto, signs = frontier.pareto(), []
    for i, batch in enumerate(frontier.batches):
        css, found = series(i), {(c.bytes, c.throughput) for c in cells if c.batch == batch}
        points = [(x.percent(size), y.percent(frontier.rate(rate))) for size, rate in sorted(found)]
        marks += [svg.line([points], css)] if len(points) > 1 else []
        on_front = {(c.bytes, c.throughput) for c in pareto if c.batch == batch}
        looks = [("hollow " if each in on_front else "") + css for each in sorted(found)]
        marks += [mark(look, batch, *each) for look, each in zip(looks, sorted(found))]
        signs += [(svg.key(css), f"batch {batch}")] if found else []
    marks += [mark("chosen", c.batch, p.compiled_bytes, c.compiled_throughput) for c, p in plans]
    signs.append((svg.key("ring"), f"no estimate of as few bytes has more {frontier.unit}"))
    signs += [(svg.key("disc"), "compiled plan"), (svg.key("budget"), "budget")]
    name = "Throughput against bytes on the device, for each size of the batch"
    titles = {"x_title": "bytes on the device", "y_title": frontier.unit}
    return svg.chart(x, y, marks, name=name, **titles) + svg.legend(signs)


def frontier_table(frontier: Frontier) -> str:
    """The estimates, with a row for each size and a column for each budget."""
    head, *rows = frontier.table()
    return svg.table(head, ([svg.escape(text) for text in row] for row in rows), "frontier")

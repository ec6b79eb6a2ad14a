"""report(): writes one HTML file about a plan, a run, or several runs side by side: figures, and
the texts about them. report_frontier() writes one about a frontier.
"""

import dataclasses
import os
import pathlib
import shlex
from collections.abc import Iterable, Sequence

from jaxmem._core.bytes import show_bytes
from jaxmem._core.files import write_whole
from jaxmem._core.versions import installed
from jaxmem._result import svg
from jaxmem._result.action_styles import PATTERNS, STYLE
from jaxmem._result.frontier import Frontier
from jaxmem._result.memory.explanation import Explanation
from jaxmem._result.plan.plan import Plan, check_is_plan, of_each, pace
from jaxmem._train.report.curves import loss_figure, pace_figure, time_figure
from jaxmem._train.report.facts import (
    KEPT,
    again,
    difference,
    error,
    facts,
    measured,
    moved,
    tiles,
    without_a_plan,
)
from jaxmem._train.report.frontier import frontier_figure, frontier_table
from jaxmem._train.report.memory import live_figure, memory_figure, runs_figure
from jaxmem._train.report.outliers import decided, outlier_maps
from jaxmem._train.report.tensors import curve_grid, runs_grid, strip_figure, why
from jaxmem._train.report.timeline import lanes_figure, places_figure
from jaxmem._train.runs.run import Run, checked, read, results, told_apart

# Texts of the page about its figures.
THROUGHPUT = (
    "Estimates of every size and budget, and the plans that were compiled. No measurement, except"
    " where a plan's time is measured."
)
BEST = (
    "The plan of the highest throughput within each budget, as compiled, with the estimates in"
    " parentheses. The plans follow below."
)
OVER_TIME = (
    "Device bytes in use over the schedule of the compiled step, by XLA's account of it: no"
    " measurement, and not to scale in time."
)
MOVED = (
    "What one step moves between device and host memory, as compiled, and which part of it moves"
    " while matrix products start. No measurement."
)
LANES = (
    "What runs when, as the plan predicts it: copies run beside the work of their layer, and what"
    " is written back to host memory after it. Where compute waits for them, they are exposed. No"
    " measurement; the work outside the layers is left out."
)
PACE = (
    "Measured from one loss to the next while training: the device's work, and what the loop does"
    " beside it."
)
OUTLIERS = (
    "Channels of the tagged tensors, from left to right, whose sum of magnitudes lies more than"
    " three standard deviations above the mean, at the steps at which they were counted."
)
DECIDED = (
    "What the rectifier decided while the model trained. Predicted and measured: seconds of a step"
    " under the plan of that moment."
)


def report(
    plan: Plan,
    path: str | os.PathLike,
    run: str | os.PathLike | None = None,
    explained: Explanation | None = None,
) -> None:
    """Writes an HTML page about a plan, and about a run under the plan.

    The page is one file that needs no other file. The file appears whole or not at all.

    plan: the plan, from `jaxmem.plan` or `Plan.load`.
    path: the file of the page. A missing folder is made.
    run: the folder of a run under the plan. The page then also shows the run's results, from
      metrics.jsonl, summary.json and explained.json, as far as these files exist. None means no
      run.
    explained: the result of `jaxmem.explain(..., plan=plan, beside=True)`. The page then also shows
      the bytes in use over the step's schedule. None means no explanation.

    Raises StepError if `plan` is no plan. Raises PlanFileError for a broken file, and names the
    file and its line or field. Raises OSError if the page cannot be written.
    """
    check_is_plan("report", plan=plan)
    path = pathlib.Path(path)
    plan = checked(plan, path)
    if run is None:
        again = f"jaxmem.plans.report(plan, {str(path)!r})"
        _write(path, _page([Run(f"plan for {plan.target}", plan, explained=explained)], again))
    else:
        found = results(run, plan)
        if explained is not None:
            found = dataclasses.replace(found, explained=explained)
        _write(path, _page([found], _command([str(run)], path)))


def report_frontier(frontier: Frontier, path: str | os.PathLike) -> None:
    """Writes an HTML page about a frontier: a plot of throughput against bytes, the table, and the
    compiled plans.

    The page is one file that needs no other file. The file appears whole or not at all.

    frontier: the frontier, from `jaxmem.plans.frontier` or `Frontier.load`.
    path: the file of the page. A missing folder is made.

    Raises OSError if the page cannot be written.
    """
    path = pathlib.Path(path)
    best = [c for budget in frontier.budgets if (c := frontier.best_cell(budget)) is not None]
    # The best cell of a budget may be the best cell of larger budgets too.
    cells = {(cell.batch, cell.budget_bytes): cell for cell in best}.values()
    name = lambda cell: f"batch {cell.batch} in {show_bytes(cell.budget_bytes)}"
    runs = [Run(name(cell), checked(cell.plan, path)) for cell in cells if cell.plan is not None]
    sizes, budgets = len(frontier.batches), len(frontier.budgets)
    units, *best_sizes = frontier.summary()
    items = "".join(svg.element("li", _sentence(text)) for text in best_sizes)
    lead = f"{sizes} sizes of the batch and {budgets} budgets on {frontier.target}"
    sections = [
        _section("Throughput against bytes", frontier_figure(frontier), THROUGHPUT),
        _section("The best size for each budget", svg.element("ul", items), BEST),
        _section("Every size and budget", frontier_table(frontier), units.strip("()")),
    ]
    sections += _sections(runs) if runs else []  # no plan: no size fits any budget
    again = f"jaxmem.plans.report_frontier(frontier, {str(path)!r})"
    title = f"frontier for {frontier.target}"
    _write(path, _document(title, _sentence(lead), sections, again))


def report_runs(runs: Sequence[str], out: pathlib.Path) -> str:
    """Writes the page about `runs`, folders of results or plans' files, to `out`; returns its path.

    Raises PlanFileError, which names the file and its line or field, for a broken file.
    """
    found = told_apart([read(run) for run in runs], list(runs))
    _write(out, _page(found, _command(runs, out)))
    return str(out)


def _command(runs: Sequence[str], out: pathlib.Path) -> str:
    """The command that makes the page again."""
    return shlex.join(["jaxmem", "report", *runs, "--out", str(out)])


def _write(path: pathlib.Path, text: str) -> None:
    """Writes the page. A lone surrogate, which JSON can hold and UTF-8 cannot, becomes a question
    mark.
    """
    write_whole(path, text.encode("utf-8", "replace"))


def _page(runs: Sequence[Run], command: str) -> str:
    """The whole document. `command` is the command or the call that makes the page anew."""
    title = f"{len(runs)} runs" if len(runs) > 1 else runs[0].name
    return _document(title, _lead(runs), _sections(runs), command)


def _sections(runs: Sequence[Run]) -> list[str]:
    """The sections of one run, or of several runs side by side."""
    course = _beside(
        _section("Time of a step", pace_figure(runs), PACE), _section("Loss", loss_figure(runs))
    )
    if len(runs) > 1:
        text = "Device bytes of the compiled step."
        body = [_compared(runs), _section("Memory of each run", runs_figure(runs), text), course]
        body.append(_section("The plans", runs_grid(runs), "What becomes of each tensor."))
        for run in runs:
            body += [svg.element("h2", svg.escape(run.name), css="run"), tiles(run)]
            body += [*_memory_and_time(run), *_rest(run)]
        return body
    (run,) = runs
    return [tiles(run), *_memory_and_time(run), course, *_rest(run)]


def _document(title: str, lead: str, sections: Sequence[str], command: str) -> str:
    """The whole document. `lead` is the first sentence of the page as HTML, and `command` is as in
    `_page`.
    """
    brand, told = svg.element("p", "jaxmem report", css="brand"), svg.element("p", lead, css="lead")
    header = svg.element("header", brand + svg.element("h1", svg.escape(title)) + told)
    body = [header, *sections, _made(command)]
    style = pathlib.Path(__file__).with_name("style.css").read_text() + STYLE
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{svg.escape(title)} – jaxmem report</title><style>{style}</style></head>\n"
        f"<body>{PATTERNS}<main>{''.join(body)}</main></body></html>\n"
    )


def _lead(runs: Sequence[Run]) -> str:
    """The first sentence of the page: the result of one run, or the names of several."""
    if len(runs) > 1:
        return svg.escape(", ".join(run.name for run in runs))
    (run,) = runs
    if run.plan is None:
        return svg.escape(without_a_plan(run).capitalize() + ".")
    p = run.plan
    less = 100 * (1 - p.compiled_bytes / p.baseline_bytes) if p.baseline_bytes else 0.0
    amount = f"{less:.0f} % less than" if less >= 0.5 else "as much as"
    said = (
        f"A step on {p.target} in {show_bytes(p.compiled_bytes)} of {show_bytes(p.budget_bytes)}:"
        f" {amount} everything kept, {pace(p)}."
    )
    return _sentence(said)


def _compared(runs: Sequence[Run]) -> str:
    """A table that compares runs; columns with 0 B in every run are left out."""

    def of(run: Run) -> dict[str, str]:
        off = {"Prediction off by": f"{error(run.plan):+.1f} %"} if run.plan else {}
        target = run.plan.target if run.plan else run.summary.get("target") or "–"
        found = {what: _told(what, size, beside) for what, size, beside in facts(run)}
        return {"Run": run.name, "Target": target} | found | off

    told = [of(run) for run in runs]
    names = [
        what
        for what in dict.fromkeys(what for fact in told for what in fact)
        if {fact.get(what, "0 B") for fact in told} != {"0 B"}
    ]  # no host memory anywhere
    rows = ([svg.breakable(fact.get(name, "–")) for name in names] for fact in told)
    return svg.element("section", svg.table(names, rows, "compare"), css="scroll")


def _told(what: str, size: str, beside: str) -> str:
    """A number in a comparison, called predicted or measured if its column does not say it."""
    return f"{size}, {beside.partition(':')[0]}" if what == KEPT else size


def _memory_and_time(run: Run) -> Iterable[str]:
    """The sections about bytes and seconds of one run."""
    plan = run.plan
    if plan is not None:
        text = (
            f"Device bytes of the whole step. Predicted were {plan.predicted_bytes:,}, compiled"
            f" {plan.compiled_bytes:,} bytes: {difference(plan)}."
        )
        memory = _section("Memory", memory_figure(plan), text)
        text = "The fastest plan at every budget, as the planner predicts it."
        yield _beside(memory, _section("Time against budget", time_figure(plan), text))
        text = f"The states of the layers, in their order{of_each(plan)}: {plan.places}."
        yield _section("Where states lie", places_figure(plan), text)
        yield _section("Lanes of a step", lanes_figure(plan), LANES)
    if run.explained is not None:
        budget = plan.budget_bytes if plan else None
        yield _section("Memory over the step", live_figure(run.explained, budget), OVER_TIME)
        yield _section("To host memory and back", moved(run.explained.transfers), MOVED)


def _rest(run: Run) -> Iterable[str]:
    """The sections about decisions: tensors, reasons, outliers and notes."""
    if (plan := run.plan) is not None:
        yield _section(
            "Plan",
            strip_figure(plan),
            "What becomes of each named tensor between the forward and the backward pass, in the"
            " order of the block.",
        )
        text = (
            "What the plans of the curve above do with each tensor, from the least bytes to the"
            " most, all predicted. The fastest within the budget is framed."
        )
        yield _section("The plan at each budget", curve_grid(plan), text)
        text = (
            f"Bytes and milliseconds of one layer{of_each(plan)}. Why: what the best other plan"
            " would do with the tensor, and its cost."
        )
        yield _section("Why", why(plan.rows), text)
        text = "Steps that were run in turns on the device at hand; the fastest is the plan."
        yield _section("Measured", measured(plan), text)
    elif not run.losses:
        yield "<p>This run has no plan and no steps.</p>"
    yield _section("Outliers", outlier_maps(run), OUTLIERS)
    yield _section("Decisions", decided(run), DECIDED)
    lossy = [f"lossy: {plan.lossy}"] if plan and plan.lossy else []
    if notes := [*lossy, *(plan.notes if plan else ())]:
        items = (svg.element("li", svg.escape(note)) for note in notes)
        yield _section("Notes", svg.element("ul", "".join(items)))
    yield _section("To make it again", again(run))


def _made(command: str) -> str:
    """The page's footer: version and command."""
    version = f"This page: jaxmem {installed('jaxmem') or '(not installed)'}"
    return svg.element(
        "footer", svg.element("p", svg.escape(version)) + svg.element("pre", svg.escape(command))
    )


def _beside(one: str, other: str) -> str:
    """Two sections side by side, or the only one."""
    return svg.element("div", one + other, css="pair") if one and other else one + other


def _section(title: str, content: str, text: str = "") -> str:
    """A section of the page; empty without content."""
    if not content:
        return ""
    lead = svg.element("p", _sentence(text), css="about") if text else ""
    return svg.element("section", svg.element("h3", svg.escape(title)) + lead + content)


def _sentence(text: str) -> str:
    """A text as HTML, without line breaks before a percent sign."""
    return svg.escape(text).replace(" %", "&nbsp;%")

"""Writes the page: the words and tables about each run, round the figures."""

import pathlib
from collections.abc import Iterable, Sequence

from jaxmem._core.bytes import show_bytes
from jaxmem._core.versions import installed
from jaxmem._result.plan.plan import of_each, pace
from jaxmem._train.report.bars import memory_figure, runs_figure, strip_figure
from jaxmem._train.report.courses import loss_figure, pace_figure
from jaxmem._train.report.curves import time_figure
from jaxmem._train.report.grid import curve_grid, runs_grid
from jaxmem._train.report.live import live_figure
from jaxmem._train.report.outliers import decided, outlier_maps
from jaxmem._train.report.svg import breakable, escape
from jaxmem._train.report.tables import again, measured, moved, table, why
from jaxmem._train.report.tiles import KEPT, difference, error, facts, tiles, without_a_plan
from jaxmem._train.report.timeline import lanes_figure, places_figure
from jaxmem._train.runs.read import Run

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


def page(runs: Sequence[Run], command: str) -> str:
    """The whole document. `command` is the command or the call that makes the page anew."""
    many = len(runs) > 1
    title = f"{len(runs)} runs" if many else runs[0].name
    body = [
        f'<header><p class="brand">jaxmem report</p><h1>{escape(title)}</h1><p'
        f' class="lead">{_lead(runs)}</p></header>'
    ]
    course = _beside(
        _section("Time of a step", pace_figure(runs), PACE), _section("Loss", loss_figure(runs))
    )
    if many:
        text = "Device bytes of the compiled step."
        body += [_compared(runs), _section("Memory of each run", runs_figure(runs), text), course]
        body.append(_section("The plans", runs_grid(runs), "What becomes of each tensor."))
        for run in runs:
            body.append(f'<h2 class="run">{escape(run.name)}</h2>{tiles(run)}')
            body += [*_memory_and_time(run), *_rest(run)]
    else:
        (run,) = runs
        body += [tiles(run), *_memory_and_time(run), course, *_rest(run)]
    body.append(_made(command))
    style = pathlib.Path(__file__).with_name("style.css").read_text()
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} – jaxmem report</title><style>{style}</style></head>\n"
        f"<body>{_PATTERNS}<main>{''.join(body)}</main></body></html>\n"
    )


def _lead(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return escape(", ".join(run.name for run in runs))
    (run,) = runs
    if run.plan is None:
        return escape(without_a_plan(run).capitalize() + ".")
    p = run.plan
    less = 100 * (1 - p.compiled_bytes / p.baseline_bytes) if p.baseline_bytes else 0.0
    takes = (
        f"{less:.0f} % less than everything kept" if less >= 0.5 else "as much as everything kept"
    )
    said = (
        f"A step on {p.target} in {show_bytes(p.compiled_bytes)} of {show_bytes(p.budget_bytes)}:"
        f" {takes}, {pace(p)}."
    )
    return escape(said).replace(" %", "&nbsp;%")


def _compared(runs: Sequence[Run]) -> str:
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
    rows = ([breakable(fact.get(name, "–")) for name in names] for fact in told)
    return f'<section class="scroll">{table(names, rows, "compare")}</section>'


def _told(what: str, size: str, beside: str) -> str:
    """A number in a comparison, which is called predicted or measured where its column does not."""
    return f"{size}, {beside.partition(':')[0]}" if what == KEPT else size


def _memory_and_time(run: Run) -> Iterable[str]:
    plan = run.plan
    if plan is not None:
        text = f"Device bytes of the whole step. {difference(plan, whole=True)}"
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
    """What decides and explains memory and time."""
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
        yield _section("Why", why(plan.rows) if plan.rows else "", text)
        text = "Steps that were run in turns on the device at hand; the fastest is the plan."
        yield _section("Measured", measured(plan), text)
    elif not run.losses:
        yield "<p>This run has no plan and no steps.</p>"
    yield _section("Outliers", outlier_maps(run), OUTLIERS)
    yield _section("Decisions", decided(run), DECIDED)
    lossy = [f"lossy: {plan.lossy}"] if plan and plan.lossy else []
    if notes := [*lossy, *(plan.notes if plan else ())]:
        yield _section(
            "Notes", "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"
        )
    yield _section("To make it again", again(run))


def _made(command: str) -> str:
    version = installed("jaxmem") or "(not installed)"
    return (
        f"<footer><p>This page: jaxmem {escape(version)}</p><pre>{escape(command)}</pre></footer>"
    )


def _beside(one: str, other: str) -> str:
    """Two sections side by side, or the only one that there is."""
    return f'<div class="pair">{one}{other}</div>' if one and other else one + other


def _section(title: str, content: str, text: str = "") -> str:
    if not content:
        return ""
    lead = f'<p class="about">{escape(text).replace(" %", "&nbsp;%")}</p>' if text else ""
    return f"<section><h3>{escape(title)}</h3>{lead}{content}</section>"


# The marks that lie over an action's colour.
_TEXTURES = {
    "recompute": '<path d="M0 7L7 0"/>',
    "compress": '<circle cx="3.5" cy="3.5" r="1.1"/>',
    "offload": '<path d="M0 3.5H7"/>',
    "compress_offload": '<path d="M0 3.5H7M3.5 0V7"/>',
}
_PATTERNS = (
    '<svg width="0" height="0" class="defs" aria-hidden="true"><defs>'
    + "".join(
        f'<pattern id="t-{name}" width="7" height="7" patternUnits="userSpaceOnUse"><g'
        f' class="texture">{marks}</g></pattern>'
        for name, marks in _TEXTURES.items()
    )
    + "</defs></svg>"
)

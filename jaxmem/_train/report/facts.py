"""The numbers of a run: the tiles under its title, the steps that ran, the host transfers, and the
command that repeats the run.
"""

import json
from collections.abc import Sequence

from jaxmem._core.bytes import show_bytes
from jaxmem._result import svg
from jaxmem._result.memory.moved import Moved, by_direction, share_beside, way_of
from jaxmem._result.plan.plan import STEP_SOURCES, Plan
from jaxmem._train.runs.run import Run

PIECE_SOURCES = {  # of the times of pieces, from which a prediction is made
    "measured": "pieces timed on the device",
    "xla": "pieces estimated by XLA",
    "roofline": "pieces estimated by a roofline",
}
KEPT = "Step, everything kept"
Tile = tuple[str, str, str]  # name, size, and a note about the size
_SETTINGS = 20_000  # characters shown


def tiles(run: Run) -> str:
    made = ""
    for what, size, beside in facts(run):
        texts = svg.element("dt", svg.escape(what)) + svg.element("dd", svg.escape(size))
        made += svg.element(
            "div", texts + svg.element("dd", svg.escape(beside), css="beside"), css="tile"
        )
    return svg.element("dl", made, css="tiles")


def facts(run: Run) -> list[Tile]:
    """The tiles under a run's title: memory, time and loss first. A comparison of runs has a column
    for each tile.
    """
    found = _bytes(run) + _times(run)
    if (value := run.number("final_loss")) is not None:
        steps = run.number("steps")
        text = "" if steps is None else f"after {steps:,.0f} steps"
        found.append(("Final loss", f"{value:.4f}", text))
    if (value := run.number("val_loss")) is not None:
        found.append(("Validation loss", f"{value:.4f}", "at the end"))
    if (value := run.number("tokens_per_second")) is not None:
        found.append(("Tokens a second", f"{value:,.0f}", "while training"))
    if value := run.number("peak_bytes"):
        found.append(("Most in use", show_bytes(int(value)), "as the device tells, while training"))
    if run.summary.get("interrupted"):
        found.append(("Interrupted", "yes", "the steps done are shown"))
    if (p := run.plan) is not None:
        seconds = p.profile_seconds + p.solve_seconds + p.compile_seconds
        found += [
            ("Budget", show_bytes(p.budget_bytes), f"target {p.target}"),
            ("Predicted", show_bytes(p.predicted_bytes), difference(p)),
            ("Host memory", show_bytes(p.host_bytes), "tensors that wait there"),
            ("Compiles", str(p.compiles), f"planned in {seconds:,.1f} s"),
        ]
    return found


def _bytes(run: Run) -> list[Tile]:
    """The bytes of the step with the plan, and without it."""
    if (p := run.plan) is not None:
        of = p.budget_bytes
        share = f"{100 * p.compiled_bytes / of:.1f} %" if of else "–"
        found = [
            ("Compiled", show_bytes(p.compiled_bytes), f"{share} of the budget"),
            ("Everything kept", show_bytes(p.baseline_bytes), "compiled without a checkpoint"),
        ]
        if p.written is not None:
            text = "under the checkpoints of its own"
            found.append(("As written", show_bytes(p.written.bytes), text))
        return found
    if size := run.number("compiled_bytes"):
        return [("Compiled", show_bytes(size), without_a_plan(run))]
    return []


def _times(run: Run) -> list[Tile]:
    """The measured and the predicted time of a step. A time is called measured only if a whole step
    ran.
    """
    found: list[Tile] = []
    chosen = next((one for one in run.plan.measured if one.chosen), None) if run.plan else None
    if run.paces:
        ordered = sorted(seconds for _, seconds in run.paces)
        low, middle, high = (
            svg.show_ms(1e3 * ordered[round(share * (len(ordered) - 1))])
            for share in (0.25, 0.5, 0.75)
        )
        text = f"while training; half of {len(ordered):,} steps took {low} to {high}"
        found.append(("Step, measured", middle, text))
    elif chosen is not None:
        low, high = svg.show_ms(1e3 * chosen.lower), svg.show_ms(1e3 * chosen.upper)
        text = f"half of {chosen.rounds} rounds took {low} to {high}"
        found.append(("Step, measured", svg.show_ms(1e3 * chosen.median), text))
    if (p := run.plan) is not None:
        source = PIECE_SOURCES.get(p.time_source, p.time_source)
        doubt = f"± {svg.show_ms(1e3 * p.uncertain_seconds)} beside everything kept; {source}"
        ran = p.baseline_source == "measured"
        told = STEP_SOURCES.get(p.baseline_source, p.baseline_source)
        told = "measured: it ran for a second" if ran else f"predicted: {told}"
        found += [
            ("Step, predicted", svg.show_ms(1e3 * p.predicted_seconds), doubt),
            (KEPT, svg.show_ms(1e3 * p.baseline_seconds), told),
        ]
        if p.written is not None:
            found.append(("Step, as written", svg.show_ms(1e3 * p.written.seconds), told))
    return found


def without_a_plan(run: Run) -> str:
    policy = run.summary.get("policy")
    return "without a plan" + (f": {policy.replace('_', ' ')}" if policy else "")


def error(plan: Plan) -> float:
    """The difference of the predicted from the compiled bytes, in percent of the compiled bytes."""
    return 100 * (plan.predicted_bytes / plan.compiled_bytes - 1) if plan.compiled_bytes else 0.0


def difference(plan: Plan) -> str:
    """The difference of the predicted from the compiled bytes, in words."""
    off = error(plan)
    if abs(off) < 0.05:
        return "as compiled"
    return f"{abs(off):.1f} % {'above' if off > 0 else 'below'} what compiled"


def measured(plan: Plan) -> str:
    """The steps that ran for a plan, the fastest first; empty if none ran."""
    head = ["step", "median", "lower quartile", "upper quartile", "rounds", "bytes"]
    rows = (
        [
            svg.escape(one.name + (" (chosen)" if one.chosen else "")),
            *(svg.show_ms(1e3 * seconds) for seconds in (one.median, one.lower, one.upper)),
            str(one.rounds),
            show_bytes(one.bytes),
        ]
        for one in sorted(plan.measured, key=lambda one: one.median)
    )
    return svg.table(head, rows, "measured") if plan.measured else ""


def moved(rows: Sequence[Moved]) -> str:
    """The host transfers of a step, with the sum of each direction; empty if there are none."""
    head = ["what", "direction", "how", "bytes a step", "beside products"]
    lines = []
    for direction, some in by_direction(rows):
        for row in some:
            size = show_bytes(row.bytes)
            lines.append([row.name, direction, way_of(row), size, share_beside([row])])
        total = show_bytes(sum(row.bytes for row in some))
        lines.append(["together", direction, "–", total, share_beside(some)])
    cells = ([svg.breakable(name), *map(svg.escape, others)] for name, *others in lines)
    return svg.table(head, cells, "moved") if lines else ""


def again(run: Run) -> str:
    """The command or the call that repeats a run or a plan, with budget, versions and settings."""
    command = run.summary.get("command")
    known: dict[str, str] = {}
    if (p := run.plan) is not None:
        call = f"jaxmem.plan(build, *arguments, budget={p.budget_bytes}, target={p.target!r})"
        command = command or call
        took = (p.profile_seconds, p.solve_seconds, p.compile_seconds)
        known = {
            "budget": f"{p.budget_bytes:,} bytes",
            "compiled": f"{p.compiled_bytes:,} bytes",
            "planned with": f"jax {p.jax_version}",
            "the blocks' fingerprint": p.fingerprint,
            "planning took": "profile {:.1f} s, solve {:.1f} s, compile {:.1f} s".format(*took),
        }
    if run.summary.get("jax_version"):
        known["ran with"] = f"jax {run.summary['jax_version']}"
    made = svg.element("pre", svg.escape(command)) if command else ""
    rows = ((name, svg.escape(value)) for name, value in known.items())
    made += svg.named_rows([], rows, "small facts") if known else ""
    if settings := run.summary.get("settings"):
        text = json.dumps(settings, indent=1)
        text = text if len(text) <= _SETTINGS else text[:_SETTINGS] + " …"
        summary = svg.element("summary", "settings") + svg.element("pre", svg.escape(text))
        made += svg.element("details", summary)
    return made

"""The tiles under a run's title: what it takes, how long, how well, each with a word beside it."""

from jaxmem._core.bytes import show_bytes
from jaxmem._result.plan.plan import SOURCES as WHOLE
from jaxmem._result.plan.plan import Plan
from jaxmem._train.report.svg import escape, show_ms
from jaxmem._train.runs.read import Run

SOURCES = {  # of the times of pieces, from which a prediction is made
    "measured": "pieces timed on the device",
    "xla": "pieces estimated by XLA",
    "roofline": "pieces estimated by a roofline",
}

KEPT = "Step, everything kept"
Tile = tuple[str, str, str]  # what, how much, and beside what


def tiles(run: Run) -> str:
    tiles = (
        f'<div class="tile"><dt>{escape(what)}</dt><dd>{escape(size)}</dd><dd'
        f' class="beside">{escape(beside)}</dd></div>'
        for what, size, beside in facts(run)
    )
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def facts(run: Run) -> list[Tile]:
    """The tiles under a run's title, memory, time and loss first; a comparison of runs has a column
    for each.
    """
    found = _bytes(run) + _times(run)
    if (value := run.number("final_loss")) is not None:
        steps = run.number("steps")
        found.append(
            ("Final loss", f"{value:.4f}", "" if steps is None else f"after {steps:,.0f} steps")
        )
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
    """What the step takes, and would take without a plan."""
    if (p := run.plan) is not None:
        share = f"{_share(p.compiled_bytes, p.budget_bytes)} of the budget"
        found = [
            ("Compiled", show_bytes(p.compiled_bytes), share),
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
    """A step's time as it was measured, and as it was predicted: a number is called measured only
    if a whole step ran.
    """
    found: list[Tile] = []
    chosen = next((one for one in run.plan.measured if one.chosen), None) if run.plan else None
    if run.paces:
        ordered = sorted(seconds for _, seconds in run.paces)
        low, middle, high = (
            show_ms(1e3 * ordered[round(share * (len(ordered) - 1))]) for share in (0.25, 0.5, 0.75)
        )
        text = f"while training; half of {len(ordered):,} steps took {low} to {high}"
        found.append(("Step, measured", middle, text))
    elif chosen is not None:
        low, high = show_ms(1e3 * chosen.lower), show_ms(1e3 * chosen.upper)
        text = f"half of {chosen.rounds} rounds took {low} to {high}"
        found.append(("Step, measured", show_ms(1e3 * chosen.median), text))
    if (p := run.plan) is not None:
        source = SOURCES.get(p.time_source, p.time_source)
        doubt = f"± {show_ms(1e3 * p.uncertain_seconds)} beside everything kept; {source}"
        ran = p.baseline_source == "measured"
        told = WHOLE.get(p.baseline_source, p.baseline_source)
        told = "measured: it ran for a second" if ran else f"predicted: {told}"
        found += [
            ("Step, predicted", show_ms(1e3 * p.predicted_seconds), doubt),
            (KEPT, show_ms(1e3 * p.baseline_seconds), told),
        ]
        if p.written is not None:
            found.append(("Step, as written", show_ms(1e3 * p.written.seconds), told))
    return found


def without_a_plan(run: Run) -> str:
    policy = run.summary.get("policy")
    return "without a plan" + (f": {policy.replace('_', ' ')}" if policy else "")


def _share(part: float, whole: float) -> str:
    """Percent, or a dash where there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def error(plan: Plan) -> float:
    """By how much the predicted bytes exceed the compiled ones, in percent of the latter."""
    return 100 * (plan.predicted_bytes / plan.compiled_bytes - 1) if plan.compiled_bytes else 0.0


def difference(plan: Plan, whole: bool = False) -> str:
    off = error(plan)
    said = (
        f"{abs(off):.1f} % {'above' if off > 0 else 'below'} what compiled"
        if abs(off) >= 0.05
        else "as compiled"
    )
    if not whole:
        return said
    return (
        f"Predicted were {plan.predicted_bytes:,}, compiled {plan.compiled_bytes:,} bytes: {said}."
    )

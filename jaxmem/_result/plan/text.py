"""Writes a plan as text: a table with a line for each tag, and the whole step's bytes and times."""

from typing import TYPE_CHECKING

from jaxmem._core.bytes import show_bytes
from jaxmem._model.states.places import DIVIDED_WORDS
from jaxmem._target.devices.target import Target
from jaxmem.errors import TargetError

if TYPE_CHECKING:
    from jaxmem._result.plan.plan import Plan

HEAD = ("tensor", "kind", "action", "codec", "before", "after", "ms", "why")


AS_WRITTEN = "the step is left as it is written: the checkpoints of its own decide it"


def table(plan: "Plan") -> str:
    """The plan as lines of plain text, as wide as they are."""
    if not plan.actions:
        return "\n".join([AS_WRITTEN, *summary(plan)])
    lines = [HEAD, *cells(plan)]
    # the last column is the longest and is not padded
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD) - 1)]
    text = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths)), line[-1]]).rstrip()
        for line in lines
    ]
    return "\n".join(text + summary(plan))


def cells(plan: "Plan") -> list[tuple[str, ...]]:
    """The table's lines without their head, a text for each of `HEAD`."""
    lines = []
    for row in plan.rows:
        name = row.tag if len(plan.actions) == 1 else f"{row.block}/{row.tag}"
        name += f" {row.size}" if row.count > 1 else ""
        # a codec's name without its settings
        codec = (row.choice.codec or "-").split("(")[0]
        sizes = show_bytes(row.bytes_before), show_bytes(row.bytes_after)
        ms = f"{row.milliseconds:.3f}"
        lines.append((name, row.kind or "-", row.choice.action.value, codec, *sizes, ms, row.why))
    return lines


def of_each(plan: "Plan") -> str:
    """What is said after bytes of one device where the plan is for several of them, else ""."""
    if plan.target == "local":
        return ""
    try:
        devices = Target.parse(plan.target).devices
    except TargetError:  # a file of another version of jaxmem may name what this one does not know
        return ""
    return f", on each of {devices} devices" if devices > 1 else ""


# What tells the seconds of the step with everything kept, in words.
SOURCES = {"measured": "measured", "xla": "XLA's estimate", "pieces": "the sum of its pieces"}


def times(plan: "Plan") -> str:
    """The step's predicted time beside that with everything kept, what tells each, and how certain
    their difference is.
    """
    ms = lambda seconds: f"{seconds * 1e3:.2f} ms"
    longer, doubt = plan.predicted_seconds - plan.baseline_seconds, plan.uncertain_seconds
    whole = SOURCES.get(plan.baseline_source, plan.baseline_source)
    kept = f"everything kept {ms(plan.baseline_seconds)} ({whole})"
    if plan.keeps_everything:
        step = f"step with {kept}"
        return step if plan.written is None else f"{step}, as written {ms(plan.written.seconds)}"
    if abs(longer) <= doubt:
        difference = f"equal as far as is known, ± {ms(doubt)}"
    else:
        difference = f"{ms(abs(longer))} {'more' if longer > 0 else 'less'}, ± {ms(doubt)}"
    own = "" if plan.written is None else f", as written {ms(plan.written.seconds)}"
    if plan.as_written:
        return f"step as written {ms(plan.predicted_seconds)}, {kept}: {difference}"
    step = f"step {ms(plan.predicted_seconds)} as predicted{own}, {kept}: {difference}"
    return f"{step} (times of pieces: {plan.time_source})"


def pace(plan: "Plan") -> str:
    """How much longer or shorter a step takes than with everything kept, in words."""
    if plan.keeps_everything or not plan.baseline_seconds:
        return "which is the fastest known"
    slower = plan.predicted_seconds / plan.baseline_seconds - 1
    known = plan.uncertain_seconds / plan.baseline_seconds
    if abs(slower) <= max(known, 5e-4):
        return "in the same step time, as far as times are known"
    return (
        f"for {100 * abs(slower):.1f} % {'more' if slower > 0 else 'less'} step time as predicted"
    )


def measured(plan: "Plan") -> list[str]:
    """What was run for the plan, fastest first."""
    return [
        f"measured: {one.median * 1e3:.2f} ms ({one.lower * 1e3:.2f} to {one.upper * 1e3:.2f} in"
        f" {one.rounds} rounds), {show_bytes(one.bytes)}: {one.name}"
        + (", which is chosen" if one.chosen else "")
        for one in sorted(plan.measured, key=lambda one: one.median)
    ]


def summary(plan: "Plan") -> list[str]:
    """What stands under the table: the whole step's bytes and times, and notes."""
    share = 100 * plan.compiled_bytes / plan.budget_bytes
    host = f"; in host memory: {show_bytes(plan.host_bytes)}" if plan.host_bytes else ""
    numbers = {"microbatches": plan.microbatches, "batch": plan.batch}
    chosen = "".join(f"; {name}: {number}" for name, number in numbers.items() if number)
    own = "" if plan.written is None else f"; as written: {show_bytes(plan.written.bytes)}"
    return [
        *([f"(bytes and ms of one layer{of_each(plan)})"] if plan.rows else []),
        f"predicted {show_bytes(plan.predicted_bytes)}, compiled {show_bytes(plan.compiled_bytes)}"
        f" of a budget of {show_bytes(plan.budget_bytes)} ({share:.1f} %) on {plan.target};"
        f" everything kept: {show_bytes(plan.baseline_bytes)}{own}{host}",
        *([] if plan.places is None else [f"states: {plan.places}"]),
        *([] if plan.divided is None else [f"over devices: {DIVIDED_WORDS[plan.divided]}"]),
        f"{times(plan)}; {plan.compiles} compile{'' if plan.compiles == 1 else 's'}{chosen}",
        *measured(plan),
        *([f"lossy: {plan.lossy}"] if plan.lossy else []),
        *(f"note: {note}" for note in plan.notes),
    ]

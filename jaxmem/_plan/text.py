"""Writes a plan as text: a table with a line for each tag, and the whole step's bytes and times."""

from typing import TYPE_CHECKING

from jaxmem._core.bytes import show_bytes

if TYPE_CHECKING:
    from jaxmem._plan.plan import Plan

HEAD = ("tensor", "kind", "action", "codec", "before", "after", "ms", "why")


def table(plan: "Plan") -> str:
    """The plan as lines of plain text, as wide as they are."""
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
    _, _, count = plan.target.partition(":")
    return f", on each of {count} devices" if count else ""


def summary(plan: "Plan") -> list[str]:
    """What stands under the table: the whole step's bytes and times, and notes."""
    share = 100 * plan.compiled_bytes / plan.budget_bytes
    host = f"; in host memory: {show_bytes(plan.host_bytes)}" if plan.host_bytes else ""
    microbatches = f"; microbatches: {plan.microbatches}" if plan.microbatches else ""
    return [
        f"(bytes and ms of one layer{of_each(plan)})",
        f"predicted {show_bytes(plan.predicted_bytes)}, compiled {show_bytes(plan.compiled_bytes)}"
        f" of a budget of {show_bytes(plan.budget_bytes)} ({share:.1f} %) on {plan.target};"
        f" everything kept: {show_bytes(plan.baseline_bytes)}{host}",
        f"step {plan.predicted_seconds * 1e3:.2f} ms, everything kept"
        f" {plan.baseline_seconds * 1e3:.2f} ms (times: {plan.time_source});"
        f" {plan.compiles} compile{'' if plan.compiles == 1 else 's'}{microbatches}",
        *(f"note: {note}" for note in plan.notes),
    ]

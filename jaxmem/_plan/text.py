"""A plan as text: a line a tag, and what the whole step comes to."""

from typing import TYPE_CHECKING

from jaxmem._core.bytes import show_bytes

if TYPE_CHECKING:
    from jaxmem._plan.plan import Plan


def table(plan: "Plan") -> str:
    """The plan as lines of plain text, as wide as they are."""
    head = ("tensor", "kind", "action", "codec", "before", "after", "ms", "why")
    lines: list[tuple[str, ...]] = [head]
    for row in plan.rows:
        name = row.tag if len(plan.actions) == 1 else f"{row.block}/{row.tag}"
        codec = (row.choice.codec or "-").split("(")[0]
        sizes = show_bytes(row.bytes_before), show_bytes(row.bytes_after)
        lines.append(
            (
                name,
                row.kind or "-",
                row.choice.action.value,
                codec,
                *sizes,
                f"{row.milliseconds:.3f}",
                row.why,
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    text = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths)), line[-1]]).rstrip()
        for line in lines
    ]
    share = 100 * plan.compiled_bytes / plan.budget_bytes
    text += [
        "(bytes and ms of one layer)",
        f"predicted {show_bytes(plan.predicted_bytes)}, compiled {show_bytes(plan.compiled_bytes)}"
        " of a budget of"
        f" {show_bytes(plan.budget_bytes)} ({share:.1f} %) on {plan.target}; everything kept:"
        f" {show_bytes(plan.baseline_bytes)}"
        + (f"; in host memory: {show_bytes(plan.host_bytes)}" if plan.host_bytes else ""),
        f"step {plan.predicted_seconds * 1e3:.2f} ms, everything kept"
        f" {plan.baseline_seconds * 1e3:.2f} ms"
        f" (times: {plan.time_source}); {plan.compiles} compiles"
        + (f"; microbatches: {plan.microbatches}" if plan.microbatches else ""),
    ]
    return "\n".join(text + [f"note: {note}" for note in plan.notes])

"""What differs between two plans: the whole step's figures, then tag by tag."""

from jaxmem._core.actions import REST, Choice
from jaxmem._core.bytes import show_bytes
from jaxmem._plan.plan import Plan

BYTES = ("budget_bytes", "compiled_bytes", "baseline_bytes", "host_bytes")
TEXTS = ("target", "fingerprint", "time_source", "jax_version")


def difference(first: Plan, second: Plan) -> str:
    """Lines of text; a line that says so where nothing differs."""
    lines = [
        f"{name}: {show_bytes(a)} -> {show_bytes(b)} ({b - a:+,} bytes)"
        for name in BYTES
        if (a := getattr(first, name)) != (b := getattr(second, name))
    ]
    lines += [
        f"{name}: {a} -> {b}"
        for name in TEXTS
        if (a := getattr(first, name)) != (b := getattr(second, name))
    ]
    a, b = 1e3 * first.predicted_seconds, 1e3 * second.predicted_seconds
    if first.time_source == second.time_source and first.target == second.target:
        if a != b:
            lines.append(f"predicted_seconds: {a:.3f} ms -> {b:.3f} ms ({b - a:+.3f} ms)")
    else:
        lines.append(
            f"predicted_seconds: {a:.3f} ms -> {b:.3f} ms, by other means: not to be compared"
        )
    places = [
        (label, tag)
        for plan in (first, second)
        for label, tags in plan.actions.items()
        for tag in tags
    ]
    for label, tag in dict.fromkeys(places):
        old, new = (plan.actions.get(label, {}).get(tag) for plan in (first, second))
        if old != new:
            name = "all that no tag names" if tag == REST else tag
            lines.append(f"{label}/{name}: {_say(old)} -> {_say(new)}")
    return "\n".join(lines) if lines else "the plans are the same"


def _say(choice: Choice | None) -> str:
    return "not in the plan" if choice is None else str(choice)

"""The differences of two plans: the figures of the whole step, then the choices for tags."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmem._core.actions import UNTAGGED, Choice
from jaxmem._core.bytes import show_bytes
from jaxmem._result.plan.plan import Plan, check_is_plan

# fields of Plan that are compared, by how they are shown
BYTES = ("budget_bytes", "compiled_bytes", "baseline_bytes", "host_bytes")
TEXTS = ("target", "fingerprint", "time_source", "jax_version", "microbatches", "batch")
SECONDS = "predicted_seconds"
FIGURES = (*BYTES, *TEXTS, SECONDS, "places", "divided", "moments", "as_written")


@dataclasses.dataclass(frozen=True)
class Difference:
    """The differences between two plans. The text form has one line for each difference.

    figures: field of `Plan` -> (value in the first plan, value in the second plan), for fields that
      differ.
    comparable: whether the seconds of both plans are for one target and from one source.
    actions: (block, tag) -> (choice of the first plan, choice of the second plan), for choices that
      differ. A choice is None if the plan does not have the tag.
    """

    figures: Mapping[str, tuple[Any, Any]]
    comparable: bool
    actions: Mapping[tuple[str, str], tuple[Choice | None, Choice | None]]

    def __str__(self) -> str:
        lines = [_figure(name, *pair, self.comparable) for name, pair in self.figures.items()]
        for (label, tag), (old, new) in self.actions.items():
            name = "all that no tag names" if tag == UNTAGGED else tag
            lines.append(f"{label}/{name}: {_say(old)} -> {_say(new)}")
        return "\n".join(lines) if lines else "the plans are the same"

    def to_json(self) -> dict[str, Any]:
        """Returns the differences as plain dicts, lists, texts and numbers.

        A pair of values becomes a list of the first plan's value and the second plan's value.
        """
        actions: dict[str, dict[str, list[str | None]]] = {}
        for (label, tag), pair in self.actions.items():
            said = [None if choice is None else str(choice) for choice in pair]
            actions.setdefault(label, {})[tag] = said
        figures = {name: list(pair) for name, pair in self.figures.items()}
        return {"figures": figures, "seconds_comparable": self.comparable, "actions": actions}


def difference(first: Plan, second: Plan) -> Difference:
    """Compares two plans, and returns their differences.

    first, second: the plans. They may belong to one model or to two models.

    Raises StepError if one of them is no plan.
    """
    check_is_plan("difference", first=first, second=second)
    pairs = {n: (getattr(first, n), getattr(second, n)) for n in FIGURES}
    said = lambda plan: plan.places and str(plan.places)
    pairs["places"] = said(first), said(second)
    chosen = [
        {(b, t): choice for b, tags in plan.actions.items() for t, choice in tags.items()}
        for plan in (first, second)
    ]
    # Every (block, tag) of either plan: first the tags of the first plan, in its order.
    choices = {key: (chosen[0].get(key), chosen[1].get(key)) for key in {**chosen[0], **chosen[1]}}
    return Difference(
        figures={name: (a, b) for name, (a, b) in pairs.items() if a != b},
        comparable=(first.time_source, first.target) == (second.time_source, second.target),
        actions={key: (a, b) for key, (a, b) in choices.items() if a != b},
    )


def _figure(name: str, a, b, comparable: bool) -> str:
    """One figure's line. Seconds from different sources or targets are shown without a difference,
    which would mean nothing.
    """
    if name in BYTES:
        return f"{name}: {show_bytes(a)} -> {show_bytes(b)} ({b - a:+,} bytes)"
    if name != SECONDS:
        return f"{name}: {'-' if a is None else a} -> {'-' if b is None else b}"
    beside = f" ({1e3 * (b - a):+.3f} ms)" if comparable else ", by other means: not to be compared"
    return f"{name}: {1e3 * a:.3f} ms -> {1e3 * b:.3f} ms{beside}"


def _say(choice: Choice | None) -> str:
    """A choice in words."""
    return "not in the plan" if choice is None else str(choice)

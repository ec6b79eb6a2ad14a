"""Groups of layers that a plan decides apart: labels such as `block[0:6]`, from a plan to the policies of a stack."""

import dataclasses
import re
from collections.abc import Iterable

from jaxmem._errors import TagError
from jaxmem._policy import Policy, remat_policy

LABEL = re.compile(r"(?P<block>.+)\[(?P<start>\d+):(?P<stop>\d+)\]")


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers `start` up to, and without, `stop`, under one policy."""

    start: int
    stop: int
    policy: Policy


def group_label(block: str, start: int, stop: int) -> str:
    return f"{block}[{start}:{stop}]"


def ungrouped(label: str) -> str:
    """The block that a label is of: that of `block[0:6]` is `block`."""
    match = LABEL.fullmatch(label)
    return match["block"] if match else label


def ranges(labels: Iterable[str], block: str) -> list[tuple[int, int]]:
    """The ranges of layers of one block among labels, in order."""
    matches = (LABEL.fullmatch(label) for label in labels)
    return sorted((int(m["start"]), int(m["stop"])) for m in matches if m and m["block"] == block)


def groups_of(plan, block: str, layers: int) -> tuple[Group, ...]:
    """The groups into which a plan divides `layers` layers: one, unless it decides them apart.

    Raises TagError if its groups are not these layers, or as `remat_policy`.
    """
    labels = () if plan is None else getattr(plan, "actions", ())
    found = ranges(labels, block)
    if not found:
        return (Group(0, layers, _stacked(plan, block)),)
    ends = [0, *(stop for _, stop in found)]
    if [start for start, _ in found] != ends[:-1] or ends[-1] != layers:
        raise TagError(
            f"stack: `plan` has groups of layers {', '.join(group_label(block, *r) for r in found)}, and `params` holds"
            f" {layers} layers; the groups must be layers 0 to {layers}, each once: plan this model anew"
        )
    return tuple(Group(*r, _stacked(plan, group_label(block, *r))) for r in found)


def _stacked(plan, label: str) -> Policy:
    return dataclasses.replace(remat_policy(plan, block=label), stacked=True)

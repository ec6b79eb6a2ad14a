"""A plan -> the policies of a stack's groups of layers."""

import dataclasses

from jaxmem._core.groups import group_label, ranges
from jaxmem._tags.policy import Policy, remat_policy
from jaxmem.errors import TagError


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers `start` up to, and without, `stop`, under one policy."""

    start: int
    stop: int
    policy: Policy


def groups_of(plan, block: str, layers: int) -> tuple[Group, ...]:
    """The groups into which a plan divides `layers` layers: one, unless it decides them apart.

    Raises TagError if its groups are not these layers, or as `remat_policy`.
    """
    found = ranges(getattr(plan, "actions", ()), block)
    if not found:
        return (Group(0, layers, _stacked(plan, block)),)
    ends = [0, *(stop for _, stop in found)]
    if [start for start, _ in found] != ends[:-1] or ends[-1] != layers:
        raise TagError(
            "stack: `plan` has groups of layers"
            f" {', '.join(group_label(block, *r) for r in found)}, and `params` holds"
            f" {layers} layers; the groups must be layers 0 to {layers}, each once: plan this model"
            " anew"
        )
    return tuple(Group(*r, _stacked(plan, group_label(block, *r))) for r in found)


def _stacked(plan, label: str) -> Policy:
    return dataclasses.replace(remat_policy(plan, block=label), stacked=True)

"""Reads from a plan which groups of layers it decides apart, and makes a policy for each."""

import dataclasses

from jaxmem._core.groups import group_label
from jaxmem._model.tags.policy import Policy, check_remat3, decisions, policy_for
from jaxmem.errors import TagError


@dataclasses.dataclass(frozen=True)
class GroupPolicy:
    """Layers `start` up to, and without, `stop`, under one policy."""

    start: int
    stop: int
    policy: Policy


def groups_of(plan, block: str, layers: int) -> tuple[GroupPolicy, ...]:
    """The groups into which a plan divides `layers` layers, in order. A plan that decides all
    layers alike gives one group of all of them.

    Raises TagError if the plan's groups do not cover layers 0 to `layers`, each once, and where
    `remat_policy` does.
    """
    check_remat3()
    decided = decisions(plan)
    found = decided.groups(block)
    if not found:
        return (GroupPolicy(0, layers, policy_for(decided, block, layers=layers)),)
    # Each group must start where the one before it stops, the first at 0, the last at the end.
    ends = [0, *(stop for _, stop in found)]
    if [start for start, _ in found] != ends[:-1] or ends[-1] != layers:
        raise TagError(
            "remat_policy: `plan` has groups of layers"
            f" {', '.join(group_label(block, *r) for r in found)}, and there are {layers} layers;"
            f" the groups must be layers 0 to {layers}, each once: plan this model anew"
        )
    of = lambda label: policy_for(decided, label, layers=layers)
    return tuple(GroupPolicy(*r, of(group_label(block, *r))) for r in found)

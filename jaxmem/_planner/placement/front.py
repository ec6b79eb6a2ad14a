"""The policies for the tensors of one layer, and the assignments of all other blocks, that are on
the Pareto front of device bytes, host bytes and seconds.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from jaxmem._core.actions import KEEP, UNTAGGED, Choice
from jaxmem._core.lists import thinned
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._planner.placement.layer import LayerPolicy
from jaxmem._planner.placement.program import NO_OTHERS
from jaxmem._planner.search.candidates import settled
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem._planner.solve.solve import solutions_between

SOLVES = 6  # intervals between the least and the most bytes; the solver is run for each boundary
# The number of policies that remain. Most of them offload nothing, and leave the link to states.
MOST_ON_DEVICE, MOST_OFFLOADED = 5, 3
Entry = TypeVar("Entry", LayerPolicy, ActionSolution)


def front(profile: Profile, block: BlockClass) -> tuple[LayerPolicy, ...]:
    """The policies for the layers of `block`, first the policies that offload nothing, then the
    others, each by rising device bytes. Everything recomputed and everything kept are among them,
    unless other policies dominate them.

    Raises SolverError as `solve` does.
    """
    alone = dataclasses.replace(profile, blocks=(block,))
    candidates: list[dict[str, Choice]] = [{}, {UNTAGGED: KEEP}]
    candidates += [solution.actions[block.name] for solution in _solutions(alone)]
    key = lambda p: (p.device_bytes, p.host_bytes, p.seconds + p.doubt_seconds)
    return _front([layer_policy(alone, block, choices) for choices in candidates], key)


def front_of_others(profile: Profile, block: BlockClass) -> tuple[ActionSolution, ...]:
    """The assignments of the blocks other than `block`, in the order of `front`. If `block` is
    the only block, one empty assignment. Raises SolverError as `solve` does.
    """
    others = dataclasses.replace(profile, blocks=tuple(b for b in profile.blocks if b is not block))
    if not others.blocks:
        return (NO_OTHERS,)
    problem = ActionProblem(others)
    found = [ActionSolution.of(problem, settled(others, s)) for s in _solutions(others)]
    return _front(found, lambda s: (s.saved_bytes, s.host_bytes, s.risk_adjusted_seconds))


def _solutions(profile: Profile) -> Iterator[ActionSolution]:
    """The solutions of least bytes and of least time, and solutions between them: without offload,
    and with offload, since offloaded tensors compete with states for the link.
    """
    for host_room in (0, None):
        problem = ActionProblem(profile, None, host_room, time_limit=10.0)
        yield from solutions_between(problem, SOLVES)


def _front(entries: Sequence[Entry], key: Callable[[Entry], tuple]) -> tuple[Entry, ...]:
    """The entries that remain: first the entries without offload, then the entries with offload."""
    best = _undominated(entries, key)
    here = thinned([entry for entry in best if not entry.host_bytes], MOST_ON_DEVICE)
    return (*here, *thinned([entry for entry in best if entry.host_bytes], MOST_OFFLOADED))


def layer_policy(profile: Profile, block: BlockClass, choices) -> LayerPolicy:
    """The policy with these choices for one layer of the block. Of the seconds of keeping, the
    writes in the forward and the reads in each backward are equal shares.
    """
    alone = dataclasses.replace(profile, blocks=(block,))
    cost = evaluate(alone, {block.name: choices}).blocks[0]
    n = block.backwards
    keep = cost.keep_seconds / (1 + n)
    return LayerPolicy(
        choices=dict(choices),
        device_bytes=cost.device_bytes,
        host_bytes=cost.host_bytes,
        forward_seconds=block.forward_seconds + keep,
        backward_seconds=(block.backward_seconds + cost.recompute_seconds) / n + keep,
        backwards=n,
        doubt_seconds=cost.doubt_seconds,
    )


def _undominated(entries: Sequence[Entry], key: Callable[[Entry], tuple]) -> list[Entry]:
    """The entries that no other entry dominates, by rising device bytes. Among equal entries, the
    first one remains.
    """
    beats = lambda a, b: all(x <= y for x, y in zip(key(a), key(b)))
    first = [p for i, p in enumerate(entries) if all(key(p) != key(o) for o in entries[:i])]
    return sorted((p for p in first if not any(beats(o, p) for o in first if o is not p)), key=key)

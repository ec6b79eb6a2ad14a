"""Finds where a plan divides a stack's layers into two groups, and what each group does.

The place is not a variable of the mixed-integer program: a program is solved for each place, and
the best answer is taken.
"""

import dataclasses
from collections.abc import Callable, Mapping

from jaxmem._core.actions import KEEP, REST
from jaxmem._core.groups import divided, divisible
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._solver.problem import Problem
from jaxmem._solver.solution import Solution, priced
from jaxmem._solver.solve import solve

MOST_DIVISIONS = 16  # places that are tried, evenly over the layers


@dataclasses.dataclass(frozen=True)
class Division:
    """Layers in two groups, and what each does.

    problem: what was solved: its profile has the block's two groups as two blocks.
    solution: the assignment for it.
    bytes: what it adds to the memory model's reference, at the larger of the two groups' peaks.
    """

    problem: Problem
    solution: Solution
    bytes: int


def best_division(problem: Problem, whole: float | None = None) -> Division | None:
    """Returns the fastest two groups of layers within the problem's room.

    The result is None if no place gives a plan that fits, if there is no stack to divide, or if the
    problem has no `room`.

    whole: bytes that a layer saves which is under no checkpoint. If they are known, the last group
      may also be kept so, which is faster and larger than every tag kept.
    """
    block, room = divisible(problem.profile), problem.room
    if block is None or room is None:
        return None
    found = []
    for k in range(1, MOST_DIVISIONS + 1):
        # `at` is the first layer of the last group. Stacks of few layers try every place.
        layers = block.divisible
        at = k * layers // (MOST_DIVISIONS + 1) if layers > MOST_DIVISIONS else k
        if not 0 < at < layers:
            continue
        found.append(_tagged(problem, block, at))
        if whole is not None:
            size = round(whole * block.layers * (layers - at) / layers)
            found.append(_last_kept_whole(problem, block, at, room - size, size))
    ready = (division for division in found if division is not None)
    return min(ready, key=lambda d: (d.solution.cautious_seconds, d.bytes), default=None)


def _tagged(problem: Problem, block: BlockClass, at: int) -> Division | None:
    """Returns the fastest plan of the layers before `at` and of those from it on, or None.

    The last layers' backward runs while everything is saved; that of the first, when what the last
    saved is gone. So only the last group's working memory is on top of all that is saved, and the
    first group's on top of its own.
    """
    split = divided(problem.profile, block, at)
    first, last = _labels(split, block)
    of = lambda label: _counted_for(problem, block, label)
    # First count the last group's working memory only. If that plan's peak lies in the first
    # group, count both, which is an overestimate.
    for working in (of(last), of(first) | of(last)):
        asked = dataclasses.replace(problem, profile=split, working=working)
        solution = solve(asked)
        if solution is None:
            return None
        peak = _peak(split, solution, first, last, of)
        if problem.room is not None and peak <= problem.room:
            return Division(asked, solution, peak)
    return None


def _last_kept_whole(
    problem: Problem, block: BlockClass, at: int, room: int, size: int
) -> Division | None:
    """Returns the fastest plan of the layers before `at` with those from it on under no checkpoint,
    or None.

    room: what is left beside `size`, the bytes of the last group.
    """
    split = divided(problem.profile, block, at)
    first, last = _labels(split, block)
    others = tuple(b for b in split.blocks if b.name != last)
    working = _counted_for(problem, block, first)
    alone = dataclasses.replace(
        problem, profile=dataclasses.replace(split, blocks=others), working=working, room=room
    )
    solution = solve(alone) if room > 0 else None
    if solution is None:
        return None
    asked = dataclasses.replace(problem, profile=split, working=working)
    both = priced(asked, solution.actions | {last: {REST: KEEP}}, solution.solve_seconds)
    return Division(asked, both, solution.bytes + size)


def _labels(split: Profile, block: BlockClass) -> tuple[str, str]:
    """The labels of a block's two groups."""
    first, last = (b.name for b in split.blocks if b.name.startswith(f"{block.name}["))
    return first, last


def _counted_for(problem: Problem, block: BlockClass, label: str) -> dict:
    """The problem's working memory, with that of the block's choices counted for the group `label`
    alone.
    """
    named = {block.name: label}
    return {(named.get(b, b), t, c): size for (b, t, c), size in problem.working.items()}


def _peak(
    split: Profile, solution: Solution, first: str, last: str, of: Callable[[str], Mapping]
) -> int:
    """Returns the larger of the two groups' peaks: that of the last group with all that is saved,
    and that of the first without what the last group saved.

    split: the profile whose layers are divided.
    solution: the assignment for it.
    first, last: the labels of the two groups.
    of: takes a label to the working memory of the block's choices under that label.
    """
    saved = {c.name: c.device_bytes * b.layers for c, b in zip(solution.cost.blocks, split.blocks)}

    def extra(label: str) -> int:
        """The working memory while this group runs: of its own choices and of other blocks'."""
        working = of(label)
        chosen = ((b, t, c) for b, tags in solution.actions.items() for t, c in tags.items())
        return round(sum(working.get(key, 0.0) for key in chosen))

    in_last = solution.saved_bytes + extra(last)
    in_first = solution.saved_bytes - saved[last] + extra(first)
    return max(in_last, in_first)

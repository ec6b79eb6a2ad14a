"""Where a plan divides a stack's layers into two groups, and what each does: the best of many small
programs.
"""

import dataclasses
from collections.abc import Callable, Mapping

from jaxmem._core.groups import divided, divisible
from jaxmem._core.profile import Profile
from jaxmem._planner.trials import Expected
from jaxmem._solver.solve import Solution, solve

MOST_DIVISIONS = 16  # tried, evenly over the layers


@dataclasses.dataclass(frozen=True)
class Division:
    """A profile whose layers are divided, an assignment for it, and what it adds to the memory
    model's reference.
    """

    profile: Profile
    transients: Mapping
    solution: Solution
    bytes: int


def best_division(
    profile: Profile, expected: Expected, room: int, host_room: int
) -> Division | None:
    """The fastest two groups of layers within `room`: bytes beside arguments and the model's
    reference.

    The last layers' backward runs while everything is saved; that of the first, when what the last
    saved is gone. So only the last group's working memory is on top of all that is saved, and the
    first group's on top of its own.
    """
    block = divisible(profile)
    if block is None:
        return None
    found = []
    for k in range(1, MOST_DIVISIONS + 1):
        at = k * block.layers // (MOST_DIVISIONS + 1) if block.layers > MOST_DIVISIONS else k
        if not 0 < at < block.layers:
            continue
        split = divided(profile, block, at)
        first, last = (b.name for b in split.blocks if b.name.startswith(f"{block.name}["))
        of = lambda label: {
            (label if b == block.name else b, t, c): s
            for (b, t, c), s in expected.transients.items()
        }
        for transients in (
            of(last),
            of(first) | of(last),
        ):  # the second is too careful, for where the first forgets
            solution = solve(split, room=room, transients=transients, host_room=host_room)
            if solution is None:
                break
            peak = _peak(split, solution, first, last, of)
            if peak <= room:
                found.append(Division(split, transients, solution, peak))
                break
    return min(found, key=lambda d: (d.solution.seconds, d.bytes), default=None)


def _peak(
    split: Profile, solution: Solution, first: str, last: str, of: Callable[[str], Mapping]
) -> int:
    """The larger of the two groups' backward: with all that is saved, and without what the last
    group saved.
    """
    saved = {c.name: c.device_bytes * b.layers for c, b in zip(solution.cost.blocks, split.blocks)}
    extra = lambda label: round(
        sum(of(label).get((label, t, c), 0.0) for t, c in solution.actions[label].items())
    )
    return max(
        solution.saved_bytes + extra(last), solution.saved_bytes - saved[last] + extra(first)
    )

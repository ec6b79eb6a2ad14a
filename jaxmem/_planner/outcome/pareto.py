"""The curve of least step time against bytes, for the budgets that were not asked for."""

from collections.abc import Callable

from jaxmem._core.actions import KEEP, RECOMPUTE, REST, Actions
from jaxmem._core.profile import Profile
from jaxmem._planner.solve.cost import Cost, everything
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solution import Solution
from jaxmem._planner.solve.solve import least_bytes, solve
from jaxmem._result.plan.rows import Point

POINTS = 12  # budgets that are solved for, the ends of the curve included


def curve(
    problem: Problem,
    whole: Callable[[int], int],
    seconds: Callable[[Cost], float],
    uncertain: Callable[[Cost], float],
    everything_bytes: int,
) -> tuple[Point, ...]:
    """Returns the fastest plans from the least bytes on, by rising bytes and falling seconds. All
    are predicted and not compiled, but for everything kept, which need not be among the fastest.

    problem: what the plan was solved for; its `room` does not count.
    whole: takes saved and working bytes to those of the step.
    seconds: takes a cost to the seconds of the step.
    uncertain: takes a cost to the seconds by which these may be off.
    everything_bytes: those of the step with everything kept, as compiled.
    """
    least, fastest = least_bytes(problem), solve(problem.within(None))
    if least is None or fastest is None:
        return ()
    found: list[Solution] = [least, fastest]
    for i in range(1, POINTS - 1):
        room = least.bytes + (fastest.bytes - least.bytes) * i // (POINTS - 1)
        if (between := solve(problem.within(room))) is not None:
            found.append(between)
    named = lambda s: whole_actions(problem.profile, s.actions)
    points = [Point(whole(s.bytes), seconds(s.cost), named(s), uncertain(s.cost)) for s in found]
    # Everything kept is no assignment of tags: its bytes are those that compiled.
    kept: Actions = {block.name: {REST: KEEP} for block in problem.profile.blocks}
    points.append(Point(everything_bytes, seconds(everything(problem.profile)), kept))
    # Points that another beats in both bytes and seconds are left out.
    front: list[Point] = []
    for p in sorted(points, key=lambda p: (p.bytes, p.seconds)):
        if not front or p.seconds < front[-1].seconds:
            front.append(p)
    return tuple(front)


def whole_actions(profile: Profile, actions: Actions) -> Actions:
    """Returns the actions with every tag named, as a plan shows and saves them."""
    found: Actions = {}
    for block in profile.blocks:
        chosen = found.setdefault(block.name, dict(actions.get(block.name, {})))
        absent = KEEP if chosen.get(REST) == KEEP else RECOMPUTE
        for tag in block.tags:
            chosen.setdefault(tag.name, absent)
    return found

"""Least step time against bytes: the budgets that were not asked for."""

from collections.abc import Callable

from jaxmem._plan.rows import Point
from jaxmem._solver.cost import everything
from jaxmem._solver.problem import Problem
from jaxmem._solver.solution import Solution
from jaxmem._solver.solve import least_bytes, solve

POINTS = 12


def curve(
    problem: Problem,
    whole: Callable[[int], int],
    seconds: Callable[[float], float],
    everything_bytes: int,
) -> tuple[Point, ...]:
    """The fastest plans from the least bytes to everything kept, by rising bytes and falling
    seconds.

    problem: what the plan was solved for; its `room` does not count.
    whole: takes saved and working bytes to those of the step.
    seconds: takes a cost's seconds to those of the step.
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
    points = [Point(whole(s.bytes), seconds(s.seconds)) for s in found]
    points.append(Point(everything_bytes, seconds(everything(problem.profile).seconds)))
    front: list[Point] = []
    for p in sorted(points, key=lambda p: (p.bytes, p.seconds)):
        if not front or p.seconds < front[-1].seconds:
            front.append(p)
    return tuple(front)

"""Least step time against bytes: the budgets that were not asked for."""

from collections.abc import Callable, Mapping

from jaxmem._core.profile import Profile
from jaxmem._plan.plan import Point
from jaxmem._solver.cost import everything
from jaxmem._solver.solve import Solution, least_bytes, solve

POINTS = 12


def curve(
    profile: Profile,
    transients: Mapping,
    host_room: int | None,
    whole: Callable[[int], int],
    seconds: Callable[[float], float],
    everything_bytes: int,
) -> tuple[Point, ...]:
    """The fastest plans from the least bytes to everything kept, by rising bytes and falling
    seconds.

    `whole`: saved and transient bytes -> those of the step. `seconds`: a cost's seconds -> those of
    the step.
    `everything_bytes`: of the step with everything kept, as compiled.
    """
    point = lambda s: Point(whole(s.bytes), seconds(s.seconds))
    least = least_bytes(profile, transients, host_room)
    fastest = solve(profile, room=None, transients=transients, host_room=host_room)
    if least is None or fastest is None:
        return ()
    found: list[Solution] = [least, fastest]
    for i in range(1, POINTS - 1):
        room = least.bytes + (fastest.bytes - least.bytes) * i // (POINTS - 1)
        if (
            between := solve(profile, room=room, transients=transients, host_room=host_room)
        ) is not None:
            found.append(between)
    points = [*map(point, found), Point(everything_bytes, seconds(everything(profile).seconds))]
    front: list[Point] = []
    for p in sorted(points, key=lambda p: (p.bytes, p.seconds)):
        if not front or p.seconds < front[-1].seconds:
            front.append(p)
    return tuple(front)

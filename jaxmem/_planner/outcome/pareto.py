"""The curve of least step time against bytes, for budgets other than the plan's budget."""

from collections.abc import Callable, Iterable

from jaxmem._core.actions import Actions, choice_of
from jaxmem._core.profile import Profile
from jaxmem._planner.search.step_time import StepTime
from jaxmem._planner.solve.cost import everything
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solve import solutions_between
from jaxmem._result.plan.rows import Point

POINTS = 12  # budgets for which the program is solved, both ends of the curve included


def curve(
    problem: ActionProblem, total: Callable[[int], int], step_time: StepTime, everything_bytes: int
) -> tuple[Point, ...]:
    """Returns the fastest plan for each of several budgets, from the least bytes on, by rising
    bytes and falling seconds. Bytes and seconds are predicted. Only the bytes of everything kept
    are compiled bytes; everything kept is a point only if no other point dominates it.

    problem: the problem of the plan; its `room` is ignored.
    total: returns the bytes of the step for saved and working bytes.
    step_time: computes the seconds of the step, and their error bound, from a cost.
    everything_bytes: compiled bytes of the step with everything kept.
    """
    solved = solutions_between(problem, POINTS - 1)
    if not solved:
        return ()
    named = lambda s: whole_actions(problem.profile, s.actions)
    seconds, uncertain = step_time.seconds, step_time.uncertainty_of
    points = [Point(total(s.bytes), seconds(s.cost), named(s), uncertain(s.cost)) for s in solved]
    # Everything kept is no assignment of choices to tags, so that the model cannot predict its
    # bytes. Its point has the compiled bytes.
    kept = problem.profile.everything_kept
    points.append(Point(everything_bytes, seconds(everything(problem.profile)), kept))
    return front(points)


def front(points: Iterable[Point]) -> tuple[Point, ...]:
    """Returns the points by rising bytes and falling seconds. A point is left out if another point
    has fewer bytes and fewer seconds.
    """
    found: list[Point] = []
    for p in sorted(points, key=lambda p: (p.bytes, p.seconds)):
        if not found or p.seconds < found[-1].seconds:
            found.append(p)
    return tuple(found)


def whole_actions(profile: Profile, actions: Actions) -> Actions:
    """Returns the actions with a choice for every tag, as a plan shows and saves them."""
    complete: Actions = {}
    for block in profile.blocks:
        chosen = complete.setdefault(block.name, dict(actions.get(block.name, {})))
        for tag in block.tags:
            chosen.setdefault(tag.name, choice_of(chosen, tag.name))
    return complete

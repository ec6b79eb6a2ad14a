"""The assignment of choices to tags that costs least time within a number of bytes: a mixed-integer
linear program.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pulp

from jaxmem._core.actions import RECOMPUTE, Actions, Choice
from jaxmem._core.profile import Profile
from jaxmem._solver.check import check_limits, check_profile
from jaxmem._solver.cost import Cost, effective, evaluate
from jaxmem._solver.program import Program, Scale
from jaxmem.errors import SolverError, TagError

Transients = Mapping[tuple[str, str, Choice], float]
Allowed = Callable[[str, str, Choice], bool]

ATTEMPTS = 20  # assignments refused after the exact count, before limits are rounded the other way
ROUNDING = 0.5  # bytes


@dataclasses.dataclass(frozen=True)
class Solution:
    """An assignment of every tag (those that nothing demands are recomputed), and its price by
    `evaluate`.
    """

    actions: Actions
    cost: Cost
    transient_bytes: int  # on top of the reference, may be negative
    solve_seconds: float = 0.0
    gap: float = 0.0  # relative, as the solver proved it

    @property
    def saved_bytes(self) -> int:
        return self.cost.saved_bytes

    @property
    def host_bytes(self) -> int:
        return self.cost.host_bytes

    @property
    def seconds(self) -> float:
        return self.cost.seconds

    @property
    def bytes(self) -> int:
        """What `room` limits: saved bytes and transient bytes."""
        return self.saved_bytes + self.transient_bytes


def solve(
    profile: Profile,
    *,
    room: int | None,
    transients: Transients | None = None,
    host_room: int | None = None,
    allowed: Allowed | None = None,
    exclude: Collection[Actions] = (),
    time_limit: float = 60.0,
) -> Solution | None:
    """The assignment of least time whose saved and transient bytes fit `room`, or None if there is
    none.

    Adacc eq. 4-8 with five actions, on the block's graph: recomputation is paid once per equation,
    whoever shares it.
    `room` is the budget less static bytes and the transient reference; `transients` are added to
    what is saved, by (block, tag, choice). `allowed` refuses choices, RECOMPUTE too; `exclude`
    refuses whole assignments, such as those that were compiled and did not fit. Raises SolverError
    on numbers that cannot be used, or if `time_limit` (seconds) runs out.
    """
    return _search(profile, "time", room, transients or {}, host_room, allowed, exclude, time_limit)


def least_bytes(
    profile: Profile,
    transients: Transients | None = None,
    host_room: int | None = None,
    *,
    allowed: Allowed | None = None,
    time_limit: float = 60.0,
) -> Solution | None:
    """The assignment of fewest saved and transient bytes, and of those the one of least time.
    Raises as `solve`.
    """
    transients = transients or {}
    least = _search(profile, "bytes", None, transients, host_room, allowed, (), time_limit)
    if least is None:
        return None
    best = _search(profile, "time", least.bytes, transients, host_room, allowed, (), time_limit)
    if best is None:
        return least
    return dataclasses.replace(best, solve_seconds=least.solve_seconds + best.solve_seconds)


def runner_up(
    profile: Profile,
    solution: Solution,
    block: str,
    tag: str,
    *,
    room: int | None,
    transients: Transients | None = None,
    host_room: int | None = None,
    allowed: Allowed | None = None,
) -> tuple[Choice, float] | None:
    """The next best choice for one tag, and the seconds a step that it costs on top, all else
    chosen anew.

    None if no other choice fits, or if nothing demands the tag, so that every choice is the same.
    """
    if tag not in solution.actions.get(block, {}):
        raise TagError(
            f"runner_up: `tag` {tag!r} of block {block!r} is not in the solution:"
            f" {solution.actions}"
        )
    chosen = solution.actions[block][tag]
    if not demanded(profile, solution, block, tag):
        return None
    refused = (block, tag, chosen)
    other = solve(
        profile,
        room=room,
        transients=transients,
        host_room=host_room,
        allowed=lambda *key: key != refused and (allowed is None or allowed(*key)),
    )
    return (
        None
        if other is None
        else (other.actions[block][tag], max(0.0, other.seconds - solution.seconds))
    )


def open_choices(
    profile: Profile, allowed: Allowed | None = None
) -> dict[tuple[str, str], tuple[Choice, ...]]:
    """(block, tag) -> the choices that every class of that label has a price for; RECOMPUTE first,
    if allowed.
    """
    result: dict[tuple[str, str], tuple[Choice, ...]] = {}
    for block in profile.blocks:
        for tag in block.tags:
            known = (RECOMPUTE, *(o.choice for o in tag.options if o.choice != RECOMPUTE))
            key = (block.name, tag.name)
            result[key] = tuple(c for c in result.get(key, known) if c in known)
    refused = allowed or (lambda *_: True)
    return {key: tuple(c for c in choices if refused(*key, c)) for key, choices in result.items()}


def priced(
    profile: Profile, actions: Actions, transients: Transients, solve_seconds=0.0, gap=0.0
) -> Solution:
    """Any assignment as a Solution."""
    cost = evaluate(profile, actions)
    actions = effective(profile, actions, cost)
    extra = math.fsum(
        transients.get((b, t, c), 0.0) for b, tags in actions.items() for t, c in tags.items()
    )
    return Solution(actions, cost, round(extra), solve_seconds, gap)


def fits(solution: Solution, room: int | None, host_room: int | None) -> bool:
    over = room is not None and solution.bytes > room + ROUNDING
    return not over and (host_room is None or solution.host_bytes <= host_room)


def _search(
    profile, goal, room, transients, host_room, allowed, exclude, time_limit
) -> Solution | None:
    check_profile(profile)
    check_limits(room, host_room, transients)
    choices = open_choices(profile, allowed)
    if not all(choices.values()):
        return None
    started = time.perf_counter()
    program = Program(profile, choices, transients, Scale.of(profile, choices, transients))
    program.limit(room, host_room)
    program.minimise(goal)
    for actions in exclude:
        program.refuse(effective(profile, actions))
    for attempt in range(ATTEMPTS + 1):
        if attempt == ATTEMPTS:
            program.limit(room, host_room, strict=True)
        gap = _run(program.problem, time_limit)
        if gap is None and attempt < ATTEMPTS:
            return None
        if gap is None:
            break
        found = priced(profile, program.actions(), transients, time.perf_counter() - started, gap)
        if fits(found, room, host_room):
            if goal == "time":
                program.agree(found.cost)
            return found
        if not choices:
            return None
        program.refuse(found.actions)  # over by less than a unit of the program's bytes
    least = _search(profile, "bytes", None, transients, host_room, allowed, exclude, time_limit)
    return least if least is not None and fits(least, room, host_room) else None


def _run(problem: pulp.LpProblem, time_limit: float) -> float | None:
    """Solves, and returns the relative gap, or None if infeasible.

    PuLP 3 returns a status and PuLP 4 an object: neither is read, since both leave HiGHS's own
    model on the problem.
    """
    problem.solve(pulp.HiGHS(msg=False, gapRel=0.0, timeLimit=time_limit))
    highs: Any = problem.solverModel
    status = highs.modelStatusToString(highs.getModelStatus())
    if "infeasible" in status.lower():
        return None
    if status != "Optimal":
        raise SolverError(
            f"the solver stopped with status {status!r} and no proven optimum; `time_limit` is"
            f" {time_limit} s:"
            " raise it, or leave out codecs or actions"
        )
    gap = highs.getInfo().mip_gap
    return gap if math.isfinite(gap) else 0.0


def demanded(profile: Profile, solution: Solution, block: str, tag: str) -> bool:
    """Whether the tag's tensor is saved, or would be if its choice were another."""
    if solution.actions[block][tag] != RECOMPUTE:
        return True
    options = open_choices(profile)[block, tag]
    other = next((c for c in options if c != RECOMPUTE), None)
    if other is None:
        return False
    changed = solution.actions | {block: solution.actions[block] | {tag: other}}
    return effective(profile, changed)[block][tag] == other

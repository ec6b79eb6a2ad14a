"""Finds the assignment of choices to tags that costs least time within a number of bytes, by a
mixed-integer linear program.
"""

import dataclasses
import math
import time
from typing import Any

import pulp

from jaxmem._core.actions import Choice
from jaxmem._planner.solve.check import check_problem
from jaxmem._planner.solve.cost import effective
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.program import MixedIntegerProgram, Scale
from jaxmem._planner.solve.solution import Solution, corrected_seconds, demanded, fits, priced
from jaxmem.errors import SolverError, TagError

# How many assignments are refused because the exact count finds them too large, before the limits
# of the program are rounded to the careful side.
ATTEMPTS = 20
FEASIBLE = 2  # HiGHS's number for a solution that meets every limit


def solve(problem: Problem) -> Solution | None:
    """Returns the assignment of least time that meets the problem's limits, or None if there is
    none. Lossy codecs count at their longest (`Cost.cautious_seconds`).

    Adacc eq. 4-8 with five actions, on the block's graph: recomputation is paid once per equation,
    whoever shares it.

    Raises SolverError on numbers that cannot be used, or if `time_limit` runs out before anything
    is found. `Solution.gap` says whether the optimum was proven.
    """
    return _search(problem, "time")


def least_bytes(problem: Problem) -> Solution | None:
    """Returns the assignment of fewest saved and working bytes, and of those the one of least time.

    The problem's `room` does not count. Raises as `solve`.
    """
    least = _search(problem.within(None), "bytes")
    if least is None:
        return None
    # The first run weighs time too little to find its optimum, so a second one looks for it within
    # the least bytes.
    best = _search(problem.within(least.bytes), "time")
    if best is None:
        return least
    return dataclasses.replace(best, solve_seconds=least.solve_seconds + best.solve_seconds)


def runner_up(
    problem: Problem, solution: Solution, block: str, tag: str
) -> tuple[Choice, float] | None:
    """Returns the next best choice for one tag, and the seconds that a step takes longer with it:
    less than 0 for a lossy choice that gains less than times are known to.

    All other tags are decided anew. The result is None if no other choice fits, or if nothing
    demands the tag, so that every choice is the same.

    problem: what `solution` was solved for.
    solution: the best assignment.
    block, tag: the label and the name of the tag.

    Raises TagError if the solution has no such tag, and as `solve`.
    """
    if tag not in solution.actions.get(block, {}):
        raise TagError(
            f"runner_up: `tag` {tag!r} of block {block!r} is not in the solution:"
            f" {solution.actions}"
        )
    if not demanded(problem.profile, solution, block, tag):
        return None
    other = solve(problem.without(block, tag, solution.actions[block][tag]))
    if other is None:
        return None
    longer = corrected_seconds(problem, other) - corrected_seconds(problem, solution)
    doubted = other.cost.doubt_seconds > solution.cost.doubt_seconds
    return other.actions[block][tag], longer if doubted else max(0.0, longer)


def _search(problem: Problem, goal: str) -> Solution | None:
    """Returns the best assignment by `goal` ("time" or "bytes") that fits by the exact count.

    The program counts bytes in rounded units, so that its answer may exceed a limit by less than a
    unit for each term. Such an answer is refused, and the program is run again.
    """
    check_problem(problem)
    choices = problem.open_choices()
    if not all(choices.values()):  # a tag whose choices are all refused
        return None
    started = time.perf_counter()
    program = MixedIntegerProgram(problem, choices, Scale.of(problem, choices))
    program.limit(problem.room, problem.host_room)
    program.minimise(goal)
    for actions in problem.excluded:
        program.refuse(effective(problem.profile, actions))
    for attempt in range(ATTEMPTS + 1):
        # Thousands of assignments may lie a hair over the room. The last run rounds sizes up, and
        # so finds none of them.
        if attempt == ATTEMPTS:
            program.limit(problem.room, problem.host_room, strict=True)
        gap = _run(program.problem, problem.time_limit)
        if gap is None and attempt < ATTEMPTS:
            return None  # rounded down, no assignment that fits is lost: there is none
        if gap is None:
            break  # rounded up, one that fits may have been lost
        found = priced(problem, program.actions(), time.perf_counter() - started, gap)
        if fits(found, problem):
            # Under the other goal seconds only break ties, too weakly to be exact.
            if goal == "time":
                program.agree(found.cost)
            return found
        if not choices:  # the one assignment there is does not fit
            return None
        program.refuse(found.actions)
    if goal == "bytes" and problem.room is None:  # as below already
        return None
    # Both roundings failed to decide. The smallest assignment is slow, but it fits if any does.
    least = _search(problem.within(None), "bytes")
    return least if least is not None and fits(least, problem) else None


def solved(problem: pulp.LpProblem, time_limit: float = 10.0) -> bool:
    """Solves a program, whose variables then have values; whether there is an answer. Raises
    SolverError where the time runs out before one is found.
    """
    return _run(problem, time_limit) is not None


def _run(problem: pulp.LpProblem, time_limit: float) -> float | None:
    """Solves, and returns the relative gap, or None if infeasible. What was found when the time ran
    out has a gap; nothing found is an error.

    PuLP 3 returns a status and PuLP 4 an object: neither is read, since both leave HiGHS's own
    model on the problem.
    """
    # By default a solver stops within a small gap; 0 asks for a proven optimum.
    problem.solve(pulp.HiGHS(msg=False, gapRel=0.0, timeLimit=time_limit))
    highs: Any = problem.solverModel
    status = highs.modelStatusToString(highs.getModelStatus())
    if "infeasible" in status.lower():
        return None
    found = highs.getInfo().primal_solution_status == FEASIBLE
    if status != "Optimal" and not (status == "Time limit reached" and found):
        raise SolverError(
            f"the solver stopped with status {status!r} and no assignment; `time_limit` is"
            f" {time_limit} s: raise it, or leave out codecs or actions"
        )
    gap = highs.getInfo().mip_gap
    # A program without whole numbers has no gap; one whose time ran out may have no bound yet.
    return 0.0 if status == "Optimal" and not math.isfinite(gap) else gap

"""Finds the assignment of choices to tags that takes the least time within byte limits, by a
mixed-integer linear program.
"""

import contextlib
import dataclasses
import functools
import math
import os
import time
from typing import Any

import highspy
import pulp

from jaxmem._core.actions import Choice
from jaxmem._planner.solve.check import check_problem
from jaxmem._planner.solve.cost import effective
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.program import MixedIntegerProgram
from jaxmem._planner.solve.solution import ActionSolution, corrected_seconds, demanded, fits
from jaxmem.errors import SolverError, TagError

# How many assignments are refused because their exact bytes exceed a limit, before the program
# rounds sizes up.
ATTEMPTS = 20
FEASIBLE = 2  # HiGHS's number for a solution that meets every limit


def solve(problem: ActionProblem) -> ActionSolution | None:
    """Returns the assignment of least time that meets the problem's limits, or None if no
    assignment meets them. Lossy codecs count at the upper end of their error bounds
    (`Cost.risk_adjusted_seconds`).

    The program is Adacc eq. 4-8 with five actions, on the block's graph: each recomputed equation
    is paid once, however many tags need it.

    Raises SolverError for numbers that the solver cannot use, and if `time_limit` runs out before
    the solver finds an assignment. `ActionSolution.gap` is 0 if the optimum was proven.
    """
    return _search(problem, "time")


def least_bytes(problem: ActionProblem) -> ActionSolution | None:
    """Returns the assignment of fewest saved and working bytes. Among several such assignments, it
    returns the fastest.

    The problem's `room` is ignored. Raises as `solve` does.
    """
    least = _search(problem.within(None), "bytes")
    if least is None:
        return None
    # In the first run, the weight of time is too small for its optimum. So a second run minimises
    # time within the least bytes.
    best = _search(problem.within(least.bytes), "time")
    if best is None:
        return least
    return dataclasses.replace(best, solve_seconds=least.solve_seconds + best.solve_seconds)


def solutions_between(problem: ActionProblem, intervals: int) -> list[ActionSolution]:
    """Returns the solution of least bytes and the solution of least time, then the fastest solution
    within each byte limit between them. The limits divide the difference of their bytes into
    `intervals` equal parts. The list is empty if no assignment meets the limits.

    The problem's `room` is ignored. Raises as `solve` does.
    """
    least, fastest = least_bytes(problem), solve(problem.within(None))
    if least is None or fastest is None:
        return []
    distance = fastest.bytes - least.bytes
    rooms = (least.bytes + distance * i // intervals for i in range(1, intervals))
    found = (solve(problem.within(room)) for room in rooms)
    return [least, fastest, *(solution for solution in found if solution is not None)]


def runner_up(
    problem: ActionProblem, solution: ActionSolution, block: str, tag: str
) -> tuple[Choice, float] | None:
    """Returns the next best choice for one tag, and the seconds by which a step with this choice is
    slower: less than 0 for a lossy choice whose gain is within the error bounds of times.

    The solver decides all other tags again. The result is None if no other choice fits, or if the
    tag is not demanded, so that all its choices cost the same.

    problem: the problem of `solution`.
    solution: the best assignment.
    block, tag: the label and the name of the tag.

    Raises TagError if the solution has no such tag, and raises as `solve` does.
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
    slower = corrected_seconds(problem, other) - corrected_seconds(problem, solution)
    is_less_certain = other.cost.doubt_seconds > solution.cost.doubt_seconds
    return other.actions[block][tag], slower if is_less_certain else max(0.0, slower)


def _search(problem: ActionProblem, goal: str) -> ActionSolution | None:
    """Returns the best assignment by `goal` ("time" or "bytes") whose exact bytes meet the limits.

    The program counts bytes in rounded units, so that its solution may exceed a limit by less than
    a unit for each term. Such a solution is refused, and the solver runs again.
    """
    check_problem(problem)
    choices = problem.open_choices()
    if not all(choices.values()):  # a tag whose choices are all refused
        return None
    started = time.perf_counter()
    program = MixedIntegerProgram(problem, choices)
    program.limit(problem.room, problem.host_room)
    program.minimise(goal)
    for actions in problem.excluded:
        program.refuse(effective(problem.profile, actions))
    least = None
    for attempt in range(ATTEMPTS + 1):
        # Thousands of assignments may exceed the room by a few bytes. The last run rounds sizes up,
        # and so returns none of them.
        if attempt == ATTEMPTS:
            program.limit(problem.room, problem.host_room, strict=True)
        gap = _run(program.problem, problem.time_limit)
        if gap is None and attempt < ATTEMPTS:
            # Sizes are rounded down, which excludes no assignment that fits. So none fits.
            return None
        if gap is None:
            break  # sizes are rounded up, which may have excluded an assignment that fits
        solution = ActionSolution.of(problem, program.actions(), time.perf_counter() - started, gap)
        if fits(solution, problem):
            # Under the goal "bytes", the weight of seconds is too small for exact seconds.
            if goal == "time":
                program.agree(solution.cost)
            return solution
        if not choices:  # the only assignment does not fit
            return None
        # The smallest assignment fits if any assignment fits. The search for it without `room`
        # would be this search.
        if attempt == 0 and not (goal == "bytes" and problem.room is None):
            least = _search(problem.within(None), "bytes")
            if least is None or not fits(least, problem):
                return None
        program.refuse(solution.actions)
    return least  # neither rounding found an assignment; the smallest is slow, but it fits


def solved(problem: pulp.LpProblem, time_limit: float = 10.0) -> bool:
    """Solves a program, and returns whether it is feasible. The variables then have values. Raises
    SolverError if the time runs out before the solver finds a solution.
    """
    return _run(problem, time_limit) is not None


def _run(problem: pulp.LpProblem, time_limit: float) -> float | None:
    """Solves a program, and returns the relative gap, or None if the program is infeasible. A
    solution at the time limit has a gap. No solution at the time limit is an error.

    PuLP 3 returns a status and PuLP 4 an object. Neither is read, since both versions leave HiGHS's
    own model on the problem.
    """
    # Remove with PuLP 3: HiGHS's own model, if PuLP 4's object has the gap and the status.
    _print_no_banner()
    # By default, a solver stops within a small gap. With 0 it proves the optimum.
    problem.solve(pulp.HiGHS(msg=False, gapRel=0.0, timeLimit=time_limit))
    highs: Any = problem.solverModel
    status = highs.modelStatusToString(highs.getModelStatus())
    if "infeasible" in status.lower():
        return None
    is_feasible = highs.getInfo().primal_solution_status == FEASIBLE
    if status != "Optimal" and not (status == "Time limit reached" and is_feasible):
        raise SolverError(
            f"the solver stopped with status {status!r} and no assignment; `time_limit` is"
            f" {time_limit} s: raise it, or leave out codecs or actions"
        )
    gap = highs.getInfo().mip_gap
    # A program without integer variables has no gap. At the time limit, the solver may have no
    # bound yet.
    return 0.0 if status == "Optimal" and not math.isfinite(gap) else gap


@functools.cache
def _print_no_banner() -> None:
    """Makes the first solver of this process with its output discarded. highspy 1.16 prints a
    banner to file descriptor 1 for the first solver, before any option reaches the solver, and the
    output of commands may be JSON.
    """
    # Remove with a fix: highspy 1.16 prints the banner.
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:  # 1 may be closed
        output = os.dup(1)
        os.dup2(nowhere.fileno(), 1)
        try:
            highspy.Highs()
        finally:
            os.dup2(output, 1)
            os.close(output)

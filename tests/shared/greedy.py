"""The baseline planner: starts with all tags kept, and repeatedly switches the choice that frees
most bytes per second of cost.
"""

import dataclasses
import math
import time

from jaxmem._core.actions import KEEP, Actions
from jaxmem._planner.solve.check import check_problem
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solution import ActionSolution, fits


def greedy(problem: ActionProblem) -> ActionSolution | None:
    """Returns an assignment that fits, found greedily, or None if no single switch frees more
    bytes.

    `solve` is compared with this function, which raises the same errors. It may miss feasible
    plans, and ignores `excluded`.
    """
    check_problem(problem)
    started, host_room = time.perf_counter(), problem.host_room
    choices = problem.open_choices()
    if not all(choices.values()):
        return None
    actions: Actions = {b.name: {} for b in problem.profile.blocks}
    for (label, tag), open_ in choices.items():
        actions[label][tag] = KEEP if KEEP in open_ else open_[0]
    # Switches that exceed the host's available bytes are skipped one by one, so the loop ends when
    # the device's limit is met. The last check below is for a start that offloads too much.
    now = ActionSolution.of(problem, actions)
    on_device = dataclasses.replace(problem, host_room=None)
    while not fits(now, on_device):
        best = None
        for (label, tag), open_ in choices.items():
            for choice in open_:
                other: Actions = actions | {label: actions[label] | {tag: choice}}
                then = ActionSolution.of(problem, other)
                freed = now.bytes - then.bytes
                costs = then.risk_adjusted_seconds - now.risk_adjusted_seconds
                if freed <= 0 or (host_room is not None and then.host_bytes > host_room):
                    continue
                # Switches without a cost in time come first, in the order of the bytes they free.
                rank = (freed / costs if costs > 0 else math.inf, freed)
                if best is None or rank > best[0]:
                    best = rank, other, then
        if best is None:
            return None
        _, actions, now = best
    if not fits(now, problem):
        return None
    return ActionSolution(now.actions, now.cost, now.working_bytes, time.perf_counter() - started)

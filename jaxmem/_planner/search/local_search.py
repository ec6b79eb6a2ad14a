"""Finds an assignment by small random changes, each judged by a liveness estimate of the step.

The assignment of least bytes is found by small changes of assignments. The alternatives are the
solver's sums over choices, and changes of one choice at a time. Peak memory is the largest over
many points of the schedule. Near the least bytes, several points take nearly as many bytes, so that
a change of one choice gains nothing. Neither the solver's sums nor single changes leave such a
plateau. Changes of up to three choices at once leave it, together with moves to assignments of
equal bytes.

Descents from different seeds end within a few per cent of each other (`benchmarks/budgets.py`). A
search always takes the same seed.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterable

from jaxmem._core.actions import UNTAGGED, Actions
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solution import ActionSolution, fits
from jaxmem.errors import TagError

PATIENCE = 40  # the most assignments that are tried after the best one
CHANGES = (1, 2, 3)  # the numbers of choices that are changed at once
# The seed is constant, so that a search repeats itself, unless the limit of estimates ends it.
SEED = 0
DRAWS = 50  # the most draws to find an assignment that was not tried before

Bytes = Callable[[Actions], float | None]


def local_search(
    starts: Iterable[Actions], problem: ActionProblem, bytes_of: Bytes, room: float
) -> ActionSolution | None:
    """Returns the fastest assignment found that takes at most `room` bytes. If none does, returns
    the assignment that exceeds `room` by the fewest bytes. None if no start could be estimated. The
    gap of the solution is infinite, since no optimum is proven.

    starts: assignments to begin with; the best of them is changed.
    problem: gives the open choices, `host_room`, and the excluded assignments.
    bytes_of: the bytes that the step is expected to take in addition to its arguments. None ends
      the search.
    room: the bytes that the step may take in addition to its arguments. 0 searches for the least
      bytes.
    """
    descent = _Descent(problem, bytes_of, room)
    for actions in starts:
        descent.visit(actions)
    descent.go()
    return None if descent.best is None else dataclasses.replace(descent.best[1], gap=math.inf)


class _Descent:
    """One descent: the current assignment, the best assignment so far, and all assignments that
    were tried.
    """

    def __init__(self, problem: ActionProblem, bytes_of: Bytes, room: float):
        self.problem, self.bytes_of, self.room = problem, bytes_of, room
        self.choices = [(k, c) for k, c in problem.open_choices().items() if len(c) > 1]
        self.best: tuple[tuple, ActionSolution] | None = None
        self.here: tuple[float, ActionSolution] | None = None
        self.tried = {_key(actions) for actions in problem.excluded}
        self.ended = False

    def go(self) -> None:
        """Tries assignments until `PATIENCE` assignments in a row were no better than the best."""
        rng, since = random.Random(SEED), 0
        while self.here is not None and self.choices and not self.ended and since < PATIENCE:
            changed = self._changed(self.here[1], rng)
            if changed is None:
                return
            since = 0 if self.visit(changed) else since + 1

    def visit(self, actions: Actions) -> bool:
        """Makes the assignment the current one if it is no worse. Returns whether it is the best
        assignment so far.
        """
        solution = self._priced(actions)
        if solution is None:
            return False
        self.tried.add(_key(solution.actions))
        # If the current assignment fits, a slower assignment needs no estimate.
        here = self.here
        seconds = solution.risk_adjusted_seconds
        if here is not None and here[0] == 0 and seconds > here[1].risk_adjusted_seconds:
            return False
        size = self.bytes_of(solution.actions)
        if size is None:
            self.ended = True
            return False
        over = max(0.0, size - self.room)
        if here is None or over <= here[0]:
            self.here = over, solution
        # If two assignments exceed the limit equally, the one with fewer host bytes is better: a
        # fetched tensor reaches the device earlier than the estimate assumes.
        rank = (over, solution.host_bytes if over else 0, seconds)
        if self.best is not None and rank >= self.best[0]:
            return False
        self.best = rank, solution
        return True

    def _changed(self, solution: ActionSolution, rng: random.Random) -> Actions | None:
        """A random small change of an assignment, which was not tried before; None if `DRAWS` draws
        find none.
        """
        for _ in range(DRAWS):
            # Remove UNTAGGED, so that the block is under a checkpoint: with UNTAGGED, the choices
            # of the block's tags have no effect.
            actions = {
                block: {tag: c for tag, c in tags.items() if tag != UNTAGGED}
                for block, tags in solution.actions.items()
            }
            for _ in range(rng.choice(CHANGES)):
                (block, tag), choices = rng.choice(self.choices)
                actions[block][tag] = rng.choice(choices)
            changed = self._priced(actions)
            if changed is not None:
                return changed.actions
        return None

    def _priced(self, actions: Actions) -> ActionSolution | None:
        """The assignment with its price; None if it has no price, was tried before, or exceeds the
        limit of host memory.
        """
        try:
            solution = ActionSolution.of(self.problem, actions)
        except TagError:
            return None
        fitting = fits(solution, self.problem.within(None))
        return solution if fitting and _key(solution.actions) not in self.tried else None


def _key(actions: Actions) -> str:
    return repr(sorted((b, sorted((t, str(c)) for t, c in x.items())) for b, x in actions.items()))

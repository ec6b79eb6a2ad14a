"""Looks for an assignment by small changes, each judged by a liveness estimate of the step.

The least bytes are found by small changes of assignments. The alternatives are the solver's sums
over choices, and changes of one choice at a time. Peak memory is the largest of many moments. Near
the least bytes several moments take nearly as much, so that one choice less gains nothing. Neither
the solver's sums nor single changes get past such a place. Changes of up to three choices at once
do, together with moves to assignments that take as many bytes as the one before.

Descents from different seeds end within a few per cent of each other (`benchmarks/budgets.py`). A
search always takes the same seed.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterable

from jaxmem._core.actions import REST, Actions
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solution import Solution, fits, priced
from jaxmem.errors import TagError

PATIENCE = 40  # how many assignments are tried after the best one
CHANGES = (1, 2, 3)  # of an assignment, at once
SEED = (
    0  # one and the same, so that a search takes the same way again, unless estimates take too long
)
DRAWS = 50  # for one assignment that was not tried before

Bytes = Callable[[Actions], float | None]


def local_search(
    starts: Iterable[Actions], problem: Problem, bytes_of: Bytes, room: float
) -> Solution | None:
    """Returns the fastest assignment found that takes at most `room`, else the one that exceeds it
    by least; None where nothing can be said of any start. Its gap is infinite: nothing is proven.

    starts: assignments to begin with; the best of them is changed.
    problem: its choices are those tried, within its `host_room`, without what it excludes.
    bytes_of: what the step is expected to take beside its arguments; None ends the search.
    room: what it may take there; 0 asks for the least.
    """
    descent = _Descent(problem, bytes_of, room)
    for actions in starts:
        descent.visit(actions)
    descent.go()
    return None if descent.best is None else dataclasses.replace(descent.best[1], gap=math.inf)


class _Descent:
    """One descent: where it is, the best that it saw, and all that it tried."""

    def __init__(self, problem: Problem, bytes_of: Bytes, room: float):
        self.problem, self.bytes_of, self.room = problem, bytes_of, room
        self.choices = [(k, c) for k, c in problem.open_choices().items() if len(c) > 1]
        self.best: tuple[tuple, Solution] | None = None
        self.here: tuple[float, Solution] | None = None
        self.tried = {_key(actions) for actions in problem.excluded}
        self.ended = False

    def go(self) -> None:
        """Tries assignments until none was better for long."""
        rng, since = random.Random(SEED), 0
        while self.here is not None and self.choices and not self.ended and since < PATIENCE:
            changed = self._changed(self.here[1], rng)
            if changed is None:
                return
            since = 0 if self.visit(changed) else since + 1

    def visit(self, actions: Actions) -> bool:
        """Goes to the assignment if it is no worse, and tells whether it is the best."""
        solution = self._priced(actions)
        if solution is None:
            return False
        self.tried.add(_key(solution.actions))
        # Of what fits only the faster is of interest, and that is known without an estimate.
        here = self.here
        if here is not None and here[0] == 0 and _slower(solution, here[1]):
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
        rank = (over, solution.host_bytes if over else 0, solution.cautious_seconds)
        if self.best is not None and rank >= self.best[0]:
            return False
        self.best = rank, solution
        return True

    def _changed(self, solution: Solution, rng: random.Random) -> Actions | None:
        """An assignment near another one, that was not tried; None where there seems to be none."""
        for _ in range(DRAWS):
            # A block under no checkpoint is put under one: with REST, its tags change nothing.
            actions = {
                block: {tag: c for tag, c in tags.items() if tag != REST}
                for block, tags in solution.actions.items()
            }
            for _ in range(rng.choice(CHANGES)):
                (block, tag), choices = rng.choice(self.choices)
                actions[block][tag] = rng.choice(choices)
            found = self._priced(actions)
            if found is not None:
                return found.actions
        return None

    def _priced(self, actions: Actions) -> Solution | None:
        """The assignment with its price; None where it has none, was tried, or needs more host
        memory than there is.
        """
        try:
            solution = priced(self.problem, actions)
        except TagError:
            return None
        fitting = fits(solution, self.problem.within(None))
        return solution if fitting and _key(solution.actions) not in self.tried else None


def _slower(one: Solution, other: Solution) -> bool:
    return one.cautious_seconds > other.cautious_seconds


def _key(actions: Actions) -> str:
    return repr(sorted((b, sorted((t, str(c)) for t, c in x.items())) for b, x in actions.items()))

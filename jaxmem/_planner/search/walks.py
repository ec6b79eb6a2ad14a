"""What a search expects of plans before it compiles them, from walks through their traces.

A walk takes a fraction of a second where a compile takes many. So the solver is asked again, with
what each walk taught, until a walk agrees with it.
"""

import time
from collections.abc import Callable, Sequence

from jaxmem._core.actions import RECOMPUTE, REST, Actions
from jaxmem._core.profile import Profile
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.solve.additive import Additive
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.memory import Expected
from jaxmem._planner.solve.solution import Solution
from jaxmem._trace.liveness.walk import runs_references

MOST_WALKS = 8  # for one question to the solver
RECALLED = 3  # plans of earlier searches that are walked through
# Seconds for all walks that teach a search's solver, and for all others of a search. Mostly steps
# whose layers a Python loop repeats take so long.
MOST_SECONDS = 20.0
MOST_SECONDS_OF_OTHERS = 40.0
MOST_SECONDS_OF_LEAST = 120.0


class Walks:
    """Walks through the traces of one step, and remembers what they told."""

    def __init__(self, steps: StepCompiler, profile: Profile, shards: int = 1):
        """Takes what traces the step, its profile, and over how many devices it is divided."""
        self._steps, self._profile, self._shards = steps, profile, shards
        self._told: dict[str, int] = {}  # bytes beside the arguments, by what is stored
        # What the solver is taught: working bytes of the assignments that it answered with.
        self._known: dict[str, tuple[Actions, int]] = {}
        self._seconds = {"taught": 0.0, "told": 0.0, "least": 0.0}
        # Seconds of this thread do not count what else the machine does, so that a search ends at
        # the same estimate on a busy one. A compiler that assigns buffers is another process.
        assigns = steps.backend.assigns
        self._clock = time.perf_counter if assigns else time.thread_time

    def learn(self, actions: Actions) -> bool:
        """Walks through the step under `actions`; False where that is known, or walks took too
        long.
        """
        if _key(actions) in self._known:
            return False
        beside = self._walked(actions, "taught", MOST_SECONDS)
        if beside is None:
            return False
        saved = evaluate(self._profile, actions).saved_bytes
        self._known[_key(actions)] = actions, beside - saved
        return True

    def told(self, actions: Actions) -> int | None:
        """The same as `beside_arguments`, from memory where it is known; None where it is not, and
        walks took too long already.
        """
        return self._walked(actions, "told", MOST_SECONDS_OF_OTHERS)

    def least(self, actions: Actions) -> int | None:
        """Estimated bytes beside the arguments, for the search for the least bytes; None once its
        own seconds are spent.
        """
        return self._walked(actions, "least", MOST_SECONDS_OF_LEAST)

    def _walked(self, actions: Actions, why: str, most: float) -> int | None:
        """The same, where walks for one purpose may take `most` seconds."""
        key = _key(actions)
        if key not in self._told:
            if self._seconds[why] > most:
                return None
            start = self._clock()
            self._told[key] = self.beside_arguments(actions)
            self._seconds[why] += self._clock() - start
        return self._told[key]

    def more_by_kernels(self, actions: Actions) -> int | None:
        """By how many bytes the step takes more with the codecs' kernels than with their
        references; None where the same of the two runs on devices that are there, where it has
        neither, or where walks took too long.

        XLA divides references itself, and does so where it compiles for GPUs that are not there. Of
        a TPU's programs the same divide kernels, whether it is there or not.
        """
        backend = self._steps.backend
        if self._shards == 1 or not backend.compiles_references:
            return None
        traced = self._steps.trace(self._steps.plan_of(actions))
        if not runs_references(traced.jaxpr) or (references := self.told(actions)) is None:
            return None
        return backend.temporary_bytes(traced, self._shards, kernels=True) - references

    def beside_arguments(self, actions: Actions) -> int:
        """Bytes that the step is expected to take beside its arguments."""
        traced = self._steps.trace(self._steps.plan_of(actions))
        return self._steps.backend.temporary_bytes(traced, self._shards)

    def model(self, measured: Sequence[tuple[Actions, float]]) -> Expected:
        """Fits the memory model to compiled plans, and to walks of others.

        measured: plans that were compiled, with their working bytes. What walks told of others is
          corrected by what they were off for these.
        """
        compiled = {_key(actions) for actions, _ in measured}
        error = self.error(measured)
        walked = [
            (actions, size + error(actions))
            for key, (actions, size) in self._known.items()
            if key not in compiled
        ]
        return Expected.fit([*measured, *walked], self._profile)

    def expecting(
        self, measured: Sequence[tuple[Actions, float]]
    ) -> Callable[[Actions], float | None]:
        """Tells what a step is expected to take beside its arguments: what its walk says, corrected
        by what walks of compiled plans were off; None where walks took too long.
        """
        error = self.error(measured)

        def beside(actions: Actions) -> float | None:
            told = self.told(actions)
            return None if told is None else told + error(actions)

        return beside

    def error(self, measured: Sequence[tuple[Actions, float]]) -> Callable[[Actions], float]:
        """Tells what a walk is expected to be short by, from what compiled plans' walks were.

        measured: plans that were compiled, with their working bytes.
        """
        # What earlier searches compiled was not walked through by this one: the latest tell enough.
        for actions, _ in measured[-RECALLED:]:
            if not any(REST in tags for tags in actions.values()):
                self.learn(actions)
        errors = [
            (actions, size - self._known[_key(actions)][1])
            for actions, size in measured
            if _key(actions) in self._known
        ]
        if not errors:
            return lambda actions: 0.0
        return Additive.fit(errors, self._profile).predict


def agreed(
    ask: Callable[[Expected], Solution | None],
    model: Callable[[], Expected],
    beside: float,
    walks: Walks,
) -> Solution | None:
    """Returns the solver's answer when it is expected to fit, or when more walks do not help; None
    where the solver has no answer.

    ask: asks the solver for a plan.
    model: the memory model, with all that walks have taught.
    beside: bytes that the plan's saved tensors and working memory may take together.
    walks: learns of each answer.
    """
    solution = ask(model())
    for _ in range(MOST_WALKS):
        if solution is None or not walks.learn(solution.actions):
            break
        known = model()
        if solution.saved_bytes + known.predict(solution.actions) <= beside:
            break
        other = ask(known)
        if other is None:
            break
        solution = other
    return solution


def _key(actions: Actions) -> str:
    """A text that two assignments share if they store the same."""
    stored = {
        block: sorted((tag, str(c)) for tag, c in tags.items() if c != RECOMPUTE)
        for block, tags in actions.items()
    }
    return repr(sorted(stored.items()))

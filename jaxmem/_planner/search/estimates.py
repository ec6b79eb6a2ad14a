"""What a search expects of plans before it compiles them, from liveness estimates of their traces.

An estimate takes a fraction of a second where a compile takes many. So the solver is asked again,
with what each estimate taught, until an estimate agrees with it.
"""

import time
from collections.abc import Callable, Sequence

from jaxmem._core.actions import REST, Actions, stored
from jaxmem._core.profile import Profile
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.solve.additive import Additive
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.memory import Expected
from jaxmem._planner.solve.solution import Solution
from jaxmem._trace.liveness.walk import runs_references

MOST_ESTIMATES = 8  # for one question to the solver
RECALLED = 3  # plans of earlier searches that are estimated
# Seconds for all estimates that teach a search's solver, for the search for the least bytes, and
# for all others. Mostly steps whose layers a Python loop repeats take so long.
MOST_SECONDS = 20.0
MOST_SECONDS_OF_OTHERS = 40.0
MOST_SECONDS_OF_LEAST = 120.0


class Estimates:
    """Liveness estimates of one step under assignments, each made once.

    steps: traces the step.
    profile: the step's.
    shards: over how many devices a block's tensors are divided.
    """

    def __init__(self, steps: StepCompiler, profile: Profile, shards: int = 1):
        self._steps, self._profile, self._shards = steps, profile, shards
        self._estimated: dict[str, int] = {}  # temporary bytes, by what an assignment stores
        # What the solver is taught: working bytes of the assignments that it answered with.
        self._taught: dict[str, tuple[Actions, int]] = {}
        self._seconds = {"taught": 0.0, "others": 0.0, "least": 0.0}
        # Seconds of this thread do not count what else the machine does, so that a search ends at
        # the same estimate on a busy one. A compiler that assigns buffers is another process.
        assigns = steps.backend.assigns
        self._clock = time.perf_counter if assigns else time.thread_time

    def learn(self, actions: Actions) -> bool:
        """Estimates the step under `actions` for the memory model; False where the model has it
        already, or estimates took too long.
        """
        if _key(actions) in self._taught:
            return False
        size = self._limited(actions, "taught", MOST_SECONDS)
        if size is None:
            return False
        saved = evaluate(self._profile, actions).saved_bytes
        self._taught[_key(actions)] = actions, size - saved
        return True

    def estimate(self, actions: Actions) -> int | None:
        """Estimated temporary bytes; None if they are not known, and estimates took too long."""
        return self._limited(actions, "others", MOST_SECONDS_OF_OTHERS)

    def estimate_for_least(self, actions: Actions) -> int | None:
        """Estimated temporary bytes, for the search for the least bytes, which has seconds of its
        own; None once they are spent.
        """
        return self._limited(actions, "least", MOST_SECONDS_OF_LEAST)

    def _limited(self, actions: Actions, purpose: str, most: float) -> int | None:
        """Estimated temporary bytes, where estimates for one purpose may take `most` seconds."""
        key = _key(actions)
        if key not in self._estimated:
            if self._seconds[purpose] > most:
                return None
            start = self._clock()
            self._estimated[key] = self.temporary_bytes(actions)
            self._seconds[purpose] += self._clock() - start
        return self._estimated[key]

    def more_by_kernels(self, actions: Actions) -> int | None:
        """By how many more bytes the step takes with the codecs' kernels than with their
        references.

        Returns None in three cases: the target compiles the kernels themselves, the step has no
        codec, or estimates took too long.
        """
        backend = self._steps.backend
        if self._shards == 1 or not backend.compiles_references:
            return None
        traced = self._steps.trace(self._steps.plan_of(actions))
        if not runs_references(traced.jaxpr) or (references := self.estimate(actions)) is None:
            return None
        return backend.temporary_bytes(traced, self._shards, kernels=True) - references

    def temporary_bytes(self, actions: Actions) -> int:
        """Bytes that the step is expected to take in addition to its arguments."""
        traced = self._steps.trace(self._steps.plan_of(actions))
        return self._steps.backend.temporary_bytes(traced, self._shards)

    def model(self, measured: Sequence[tuple[Actions, float]]) -> Expected:
        """Fits the memory model to compiled plans, and to estimates of others.

        measured: plans that were compiled, with their working bytes. What estimates told of others
        is
          corrected by what they were off for these.
        """
        compiled = {_key(actions) for actions, _ in measured}
        error = self.error(measured)
        estimated = [
            (actions, size + error(actions))
            for key, (actions, size) in self._taught.items()
            if key not in compiled
        ]
        return Expected.fit([*measured, *estimated], self._profile)

    def expecting(
        self, measured: Sequence[tuple[Actions, float]]
    ) -> Callable[[Actions], float | None]:
        """Tells what a step is expected to take beside its arguments: what its estimate says,
        corrected by what estimates of compiled plans were off; None where estimates took too long.
        """
        error = self.error(measured)

        def beside(actions: Actions) -> float | None:
            told = self.estimate(actions)
            return None if told is None else told + error(actions)

        return beside

    def error(self, measured: Sequence[tuple[Actions, float]]) -> Callable[[Actions], float]:
        """Tells what an estimate is expected to be short by, from what compiled plans' estimates
        were.

        measured: plans that were compiled, with their working bytes.
        """
        # What earlier searches compiled was not estimated by this one: the latest tell enough.
        for actions, _ in measured[-RECALLED:]:
            if not any(REST in tags for tags in actions.values()):
                self.learn(actions)
        errors = [
            (actions, size - self._taught[_key(actions)][1])
            for actions, size in measured
            if _key(actions) in self._taught
        ]
        if not errors:
            return lambda actions: 0.0
        return Additive.fit(errors, self._profile).predict


def agreed(
    ask: Callable[[Expected], Solution | None],
    model: Callable[[], Expected],
    beside: float,
    estimates: Estimates,
) -> Solution | None:
    """Returns the solver's answer when it is expected to fit, or when more estimates do not help;
    None where the solver has no answer.

    ask: asks the solver for a plan.
    model: the memory model, with all that estimates have taught.
    beside: bytes that the plan's saved tensors and working memory may take together.
    estimates: learns of each answer.
    """
    solution = ask(model())
    for _ in range(MOST_ESTIMATES):
        if solution is None or not estimates.learn(solution.actions):
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
    plain = {b: sorted((t, str(c)) for t, c in tags.items()) for b, tags in stored(actions).items()}
    return repr(sorted(plain.items()))

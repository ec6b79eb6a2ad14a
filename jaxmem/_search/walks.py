"""What a search expects of plans before it compiles them, from walks through their traces.

A walk takes a fraction of a second where a compile takes many. So the solver is asked again, with
what each walk taught, until a walk agrees with it.
"""

import time
from collections.abc import Callable, Sequence

import jax

from jaxmem._core.actions import RECOMPUTE, REST, Actions
from jaxmem._core.profile import Profile
from jaxmem._liveness.walk import temporary_bytes
from jaxmem._search.compile import StepCompiler
from jaxmem._solver.cost import evaluate
from jaxmem._solver.memory import Expected, MemoryModel
from jaxmem._solver.solution import Solution

MOST_WALKS = 8  # for one question to the solver
RECALLED = 3  # plans of earlier searches that are walked through
MOST_SECONDS = 20.0  # for all walks of a search: steps whose layers a Python loop repeats take long


class Walks:
    """Walks through the traces of one step, and remembers what they told."""

    def __init__(self, steps: StepCompiler, profile: Profile, shards: int = 1):
        """Takes what traces the step, its profile, and over how many devices it is divided."""
        self._steps, self._profile, self._shards = steps, profile, shards
        self._known: dict[str, tuple[Actions, int]] = {}
        self._seconds = 0.0

    def learn(self, actions: Actions) -> bool:
        """Walks through the step under `actions`; False where that is known, or walks took too
        long.
        """
        if _key(actions) in self._known or self._seconds > MOST_SECONDS:
            return False
        start = time.perf_counter()
        saved = evaluate(self._profile, actions).saved_bytes
        self._known[_key(actions)] = actions, self.beside_arguments(actions) - saved
        self._seconds += time.perf_counter() - start
        return True

    def beside_arguments(self, actions: Actions) -> int:
        """Bytes that the step is expected to take beside its arguments."""
        traced = self._steps.trace(self._steps.plan_of(actions))
        donated = [i for i, a in enumerate(jax.tree.leaves(traced.args_info)) if a.donated]
        on_gpu = self._steps.backend.target.platform == "cuda"
        return temporary_bytes(traced.jaxpr, donated, on_gpu=on_gpu, shards=self._shards)

    def model(self, measured: Sequence[tuple[Actions, float]]) -> Expected:
        """Fits the memory model to compiled plans, and to walks of others.

        measured: plans that were compiled, with their working bytes. What walks told of others is
          corrected by what they were off for these.
        """
        compiled = {_key(actions) for actions, _ in measured}
        # What earlier searches compiled was not walked through by this one: the latest tell enough.
        for actions, _ in measured[-RECALLED:]:
            if not any(REST in tags for tags in actions.values()):
                self.learn(actions)
        errors = [
            (actions, size - self._known[_key(actions)][1])
            for actions, size in measured
            if _key(actions) in self._known
        ]
        error = MemoryModel.fit(errors, self._profile).predict if errors else lambda actions: 0.0
        walked = [
            (actions, size + error(actions))
            for key, (actions, size) in self._known.items()
            if key not in compiled
        ]
        return Expected.fit([*measured, *walked], self._profile)


def agreed(
    ask: Callable[[Expected], Solution | None],
    model: Callable[[], Expected],
    beside: float,
    walks: Walks | None,
) -> Solution | None:
    """Returns the solver's answer when it is expected to fit, or when more walks do not help; None
    where the solver has no answer.

    ask: asks the solver for a plan.
    model: the memory model, with all that walks have taught.
    beside: bytes that the plan's saved tensors and working memory may take together.
    walks: learns of each answer; None where nothing can be walked through.
    """
    solution = ask(model())
    for _ in range(MOST_WALKS):
        if solution is None or walks is None or not walks.learn(solution.actions):
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

"""The bytes that a search predicts for plans before it compiles them: from liveness estimates of
their programs, and for a TPU that the machine does not have, from compiles for buffers.

An estimate takes a fraction of a second, and a compile takes many seconds. So the solver solves
again with each estimate, until an estimate agrees with the solution. Most programs are derived from
one trace (`RecomputedStep`); programs of groups of layers and of spans are traced.

The size of the programs limits the number of estimates. The first choice was a limit in
seconds. A plan then depended on the speed of the machine, and the plan of a step whose layers a
Python loop repeats differed between two runs.
"""

from collections.abc import Callable, Sequence

from jaxmem._core.actions import UNTAGGED, Actions, stored
from jaxmem._core.profile import Profile
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.solve.additive import Additive
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.memory import prior_bytes
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem._trace.jaxpr import as_closed, equations
from jaxmem._trace.liveness.walk import runs_references

MOST_ESTIMATES = 8  # estimates for one problem of the solver
RECALLED = 3  # plans of earlier searches that are estimated
# The most equations of the programs that a search estimates, by purpose: estimates to which the
# memory model is fitted, estimates in the search for the least bytes, and all others. A traced
# equation takes 130 to 350 microseconds of a core, so that the limits are about 20, 100 and 40
# seconds if each program is traced; a derived program counts as if it were traced. Only steps with
# Python loops over layers reach the limits.
MOST_EQUATIONS = {"taught": 100_000, "least": 500_000, "others": 200_000}
COMPILED = 10  # a compile for buffers takes about as long as this number of estimates


class Estimates:
    """Liveness estimates of one step under assignments. The estimate of an assignment is made once.

    compiler: traces the step.
    profile: the profile of the step.
    shards: the number of devices over which a block's tensors are divided.
    """

    def __init__(self, compiler: StepCompiler, profile: Profile, shards: int = 1):
        self._compiler, self._profile, self._shards = compiler, profile, shards
        # Temporary bytes and equations of the step, by the choices that an assignment stores.
        self._estimated: dict[str, tuple[int, int]] = {}
        # Working bytes of the assignments that the memory model is fitted to.
        self._taught: dict[str, tuple[Actions, int]] = {}
        # The requested assignments, by purpose. An estimate counts for each purpose that requested
        # it, so that the limit of one purpose does not depend on the others.
        self._requested: dict[str, set[str]] = {purpose: set() for purpose in MOST_EQUATIONS}

    def learn(self, actions: Actions) -> bool:
        """Estimates the step under `actions` for the memory model. Returns False if the model has
        the estimate already, or if the limit is reached.
        """
        if _key(actions) in self._taught:
            return False
        size = self.estimate(actions, "taught")
        if size is None:
            return False
        saved = evaluate(self._profile, actions).saved_bytes
        self._taught[_key(actions)] = actions, size - saved
        return True

    def estimate(self, actions: Actions, purpose: str = "others") -> int | None:
        """Estimated temporary bytes; None if the equations of one purpose reached their limit."""
        key, requested = _key(actions), self._requested[purpose]
        traced = sum(self._estimated[k][1] for k in requested)
        if key not in requested and traced > MOST_EQUATIONS[purpose]:
            return None
        if key not in self._estimated:
            self._estimated[key] = self.estimate_step(actions)
        requested.add(key)
        return self._estimated[key][0]

    def estimate_step(self, actions: Actions) -> tuple[int, int]:
        """Estimated temporary bytes, and the number of equations that the estimate counts as."""
        compiler, backend = self._compiler, self._compiler.backend
        traced, program = compiler.derived(compiler.plan_of(actions))
        count = sum(1 for _ in equations(as_closed(program or traced.jaxpr).jaxpr))
        count *= COMPILED if backend.stops_at_buffers else 1
        size = backend.temporary_bytes(traced, self._shards, args=compiler.args, program=program)
        return size, count

    def more_by_kernels(self, actions: Actions) -> int | None:
        """The bytes that the step takes with the codecs' kernels, less its bytes with the codecs'
        references.

        Returns None in three cases: the target compiles the kernels themselves, the step has no
        codec, or the limit of estimates is reached.
        """
        backend = self._compiler.backend
        if self._shards == 1 or not backend.compiles_references:
            return None
        traced = self._compiler.trace(self._compiler.plan_of(actions))
        if not runs_references(traced.jaxpr) or (references := self.estimate(actions)) is None:
            return None
        args = self._compiler.args
        return backend.temporary_bytes(traced, self._shards, True, args) - references

    def model(self, measured: Sequence[tuple[Actions, float]]) -> Additive:
        """Fits the memory model to compiled plans, and to estimates of others.

        measured: compiled plans with their working bytes. The errors of their estimates correct the
          estimates of other plans.
        """
        compiled = {_key(actions) for actions, _ in measured}
        error = self.error(measured)
        estimated = [
            (actions, size + error(actions))
            for key, (actions, size) in self._taught.items()
            if key not in compiled
        ]
        profile = self._profile
        return Additive.fit([*measured, *estimated], profile, prior_bytes(profile))

    def expecting(
        self, measured: Sequence[tuple[Actions, float]]
    ) -> Callable[[Actions], float | None]:
        """A function of actions: the bytes that the step is expected to take in addition to its
        arguments. It corrects the estimate by the errors of estimates of compiled plans, and
        returns None once the limit of estimates is reached.
        """
        error = self.error(measured)

        def expected(actions: Actions) -> float | None:
            size = self.estimate(actions)
            return None if size is None else size + error(actions)

        return expected

    def error(self, measured: Sequence[tuple[Actions, float]]) -> Callable[[Actions], float]:
        """A function of actions: the bytes by which an estimate is expected to be too small, from
        the errors of compiled plans' estimates.

        measured: compiled plans with their working bytes.
        """
        # This search did not estimate the compiles of earlier searches. Estimates of the latest
        # compiles are enough.
        for actions, _ in measured[-RECALLED:]:
            if not any(UNTAGGED in tags for tags in actions.values()):
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
    solve: Callable[[Additive], ActionSolution | None],
    model: Callable[[], Additive],
    available: float,
    estimates: Estimates,
) -> ActionSolution | None:
    """Solves and estimates in alternation, until an estimate agrees that the solution fits. Returns
    the last solution if more estimates do not help; None if the problem has no solution.

    solve: solves for a plan by a memory model.
    model: returns the memory model, fitted to all estimates so far.
    available: bytes that the plan's saved tensors and working memory may take together.
    estimates: estimates each solution.
    """
    solution = solve(model())
    for _ in range(MOST_ESTIMATES):
        if solution is None or not estimates.learn(solution.actions):
            break
        known = model()
        if solution.saved_bytes + known.predict(solution.actions) <= available:
            break
        other = solve(known)
        if other is None:
            break
        solution = other
    return solution


def _key(actions: Actions) -> str:
    """A text that is equal for two assignments if both store the same choices."""
    plain = {b: sorted((t, str(c)) for t, c in tags.items()) for b, tags in stored(actions).items()}
    return repr(sorted(plain.items()))

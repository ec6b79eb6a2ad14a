"""The search for a plan that places model states: solves the program over placements, makes a
liveness estimate of its solution, compiles the solution, and corrects the program by the errors of
both.

The working memory of a group of layers is the working memory of a step whose layers are all in that
group, from a liveness estimate. A step of several groups has the largest of their working memories.
An estimate of the solution itself finds the error of this rule, and the program is solved again;
compiles find the error of the estimates. A step has at most three groups of layers (`MOST_GROUPS`),
and each group has at least two layers.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxmem._core.actions import Actions
from jaxmem._core.assignment import Assignment
from jaxmem._core.groups import group_label
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._core.progress import LOG
from jaxmem._model.states.places import Places
from jaxmem._planner.placement.layer import RESIDENT, LayerPolicy
from jaxmem._planner.placement.program import PlacementProblem, PlacementSolution, solve_placement
from jaxmem._planner.placement.steps import PlacedSteps
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._planner.search.trial import Limits, solve_and_compile
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem.errors import StepError

MOST_COMPILES = 3
MOST_ESTIMATES = 6  # estimates to find one solution to compile
ENOUGH = 0.98  # a plan that uses at least this share of the usable bytes ends the search
# A solution that is expected to use at least this share of the usable bytes is not improved:
# estimates are no more exact.
FULL_SHARE = 0.995


@dataclasses.dataclass(frozen=True)
class PlacedTrial:
    """A solution that was compiled.

    solution: counts of layers by group.
    predicted_bytes: the prediction of `total` before the compile.
    step: the compiled step.
    """

    solution: PlacementSolution
    predicted_bytes: int
    step: CompiledStep

    @property
    def total(self) -> int:
        return self.step.total


@dataclasses.dataclass
class PlacementSearch:
    """The state of a search over placements.

    steps: traces, estimates and compiles steps.
    profile: the profile of the step with its states in device memory.
    block: the layers whose states are placed.
    problem: the problem of the program, without limits and without corrections.
    limits: the bytes that a plan may take.
    notes: sentences for the user.
    error: the bytes by which compiled steps are expected to exceed their liveness estimates, from
      the last trial.
    is_safer: whether `error` is more than the error of any trial, since no trial fits.
    profile_seconds, solve_seconds: the time of tracing and profiling, and the time of the solver.
    trials: the solutions that were compiled.
    refused: the solutions that XLA did not compile.
    """

    steps: PlacedSteps
    profile: Profile
    block: BlockClass
    problem: PlacementProblem
    limits: Limits
    notes: tuple[str, ...] = ()
    error: int = 0
    is_safer: bool = False
    profile_seconds: float = 0.0
    solve_seconds: float = 0.0
    trials: list[PlacedTrial] = dataclasses.field(default_factory=list)
    refused: list[PlacementSolution] = dataclasses.field(default_factory=list)

    def run(self) -> PlacedTrial | None:
        """The fastest solution that compiles within the limits; None if no solution does."""
        solve_and_compile(self, self.next_solutions)
        if self.trials and not self.fitting:
            self._try_safer()
        return min(self.fitting, key=lambda t: t.solution.risk_adjusted_seconds, default=None)

    @property
    def compiles_left(self) -> int:
        """The number of solutions that may still be compiled."""
        return MOST_COMPILES - len(self.trials)

    def next_solutions(self) -> list[PlacementSolution]:
        """The solution to compile next; no solution if the last trial is good enough, or if the
        next solution was compiled before.
        """
        if self.refused or (self.trials and self._is_enough(self.trials[-1])):
            return []
        solution = self.agreed()
        return [] if solution is None or self._is_tried(solution) else [solution]

    def compile_solutions(self, solutions: Sequence[PlacementSolution]) -> None:
        """Compiles solutions, and learns the error of their estimates. A solution that XLA does not
        compile is refused.

        Raises StepError if XLA does not compile the first solution.
        """
        for solution in solutions:
            predicted = self.expected(solution)
            LOG.info("compile %d: %s", len(self.trials) + 1, solution.places)
            try:
                step = self.steps.compile_fully(self.assignment(solution), solution.places)
            except StepError as error:
                # A solution that XLA does not compile because of a defect does not invalidate the
                # trials before it.
                if not self.trials:
                    raise
                LOG.warning("a plan is left out: %s", str(error)[:400])
                self.refused.append(solution)
                continue
            self.trials.append(PlacedTrial(solution, predicted, step))
            self.error = step.total - self._estimated_of(solution)

    def _try_safer(self) -> None:
        """Compiles, if no trial fits, a solution that is smaller by more than the spread of the
        errors, and then the solution of least bytes.
        """
        errors = [t.total - self._estimated_of(t.solution) for t in self.trials]
        self.error, self.is_safer = 2 * max(errors) - min(errors), True
        for find in (self.agreed, self.least):
            solution = find()
            if solution is not None and not self.fitting and not self._is_tried(solution):
                self.compile_solutions([solution])

    def _is_tried(self, solution: PlacementSolution) -> bool:
        key = lambda s: (s.counts, s.outer, s.others.actions)
        return any(key(solution) == key(t.solution) for t in self.trials)

    @property
    def fitting(self) -> list[PlacedTrial]:
        return [t for t in self.trials if self.limits.allow(t.step)]

    def agreed(self) -> PlacementSolution | None:
        """The fastest solution that estimates expect to fit. The program's working memory is exact
        only for steps with one group of layers. An estimate of the solution shows the error of the
        sums for several groups, and the program is solved again.
        """
        room, best = self.limits.usable_bytes, None
        short = solvable = self.error  # `solvable`: the last `short` for which there was a solution
        low = high = None  # the last `short` whose solution did not fit, and did
        for _ in range(MOST_ESTIMATES):
            solution = self._solved(self.within(room, short))
            if solution is None:
                short = (solvable + short) // 2
                continue
            solvable = short
            expected = self.expected(solution)
            if expected <= room and (
                best is None or solution.risk_adjusted_seconds < best.risk_adjusted_seconds
            ):
                best = solution
            # The error of the sums is assumed to be the same for the next solution.
            error = expected - solution.device_bytes
            if error == 0 or (expected <= room and error > -(1 - FULL_SHARE) * room):
                break
            low, high = (low, short) if expected <= room else (short, high)
            short += error
            if low is not None and high is not None and not low < short < high:
                short = (low + high) // 2
        # No solution is expected to fit: the solution of least bytes may fit.
        return self.least() if best is None else best

    def expected(self, solution: PlacementSolution) -> int:
        """The predicted device bytes of a compiled step under a solution. Between the estimates of
        two trials, errors are interpolated: the error grows with the number of resident layers if
        XLA copies their states.
        """
        estimated = self._estimated_of(solution)
        trials = sorted((self._estimated_of(t.solution), t.total) for t in self.trials)
        if len(trials) < 2 or self.is_safer:
            return estimated + self.error
        known = [of_trial for of_trial, _ in trials]
        errors = [total - of_trial for of_trial, total in trials]
        return estimated + round(np.interp(estimated, known, errors))

    def _estimated_of(self, solution: PlacementSolution) -> int:
        return self.steps.estimate(self.assignment(solution), solution.places)

    def assignment(self, solution: PlacementSolution) -> Assignment:
        """The argument of `build` under a solution."""
        return Assignment(self.actions(solution))

    def actions(self, solution: PlacementSolution) -> Actions:
        """The choices of each range of layers, and of the other blocks."""
        policies, name, ranges = self.problem.policies, self.block.name, solution.ranges
        label = lambda a, b: name if len(ranges) == 1 else group_label(name, a, b)
        layers = {label(a, b): dict(policies[p].choices) for a, b, p in ranges}
        return {**outside(self.profile, solution.others), **layers}

    def least(self) -> PlacementSolution | None:
        """The solution of fewest device bytes; None if host memory is too small for any."""
        return solve_placement(self.within(None), "bytes")

    def within(self, room: int | None, short: int = 0) -> PlacementProblem:
        """The problem with limits: `room` device bytes, and this search's limit of host bytes.

        short: bytes by which the problem's sums are known to be too small.
        """
        host = self.limits.host_bytes
        return dataclasses.replace(self.problem, room=room, host_room=host, short=short)

    def _solved(self, problem: PlacementProblem) -> PlacementSolution | None:
        solution = solve_placement(problem)
        self.solve_seconds += 0.0 if solution is None else solution.solve_seconds
        return solution

    def _is_enough(self, trial: PlacedTrial) -> bool:
        """Whether a trial fits, and no faster solution is worth a compile. This is the case if the
        trial uses the budget, or if no solution without a limit is faster.
        """
        if not self.limits.allow(trial.step):
            return False
        if trial.total >= ENOUGH * self.limits.usable_bytes:
            return True
        fastest = self._solved(self.within(None))
        seconds = trial.solution.risk_adjusted_seconds
        return fastest is not None and fastest.risk_adjusted_seconds >= seconds


def outside(profile: Profile, others: ActionSolution) -> Actions:
    """The actions of the blocks outside the stack, also of those that save nothing."""
    return {**{label: {} for label in profile.idle_blocks}, **others.actions}


def with_working(
    problem: PlacementProblem, steps: PlacedSteps, profile: Profile
) -> tuple[LayerPolicy, ...]:
    """The policies of a problem with their working memory: the working memory of a step all of
    whose layers have the policy. Each policy is estimated with states in host memory, and the first
    policy with resident states too. The blocks outside the stack have their fastest assignment.

    Over several devices, all layers have resident states, or layers are gathered one at a time
    whether their own states are resident or not.
    """
    policies, others, sharding = problem.policies, problem.fastest_others, problem.sharding
    states = steps.states()
    layers = states.layers
    streamed, resident = Places(layers, 0), Places(layers, layers)

    def working(policy: LayerPolicy, places: Places) -> int:
        assignment = Assignment({**outside(profile, others), steps.label: policy.choices})
        stored = states.fixed + states.outside + others.saved_bytes + layers * policy.device_bytes
        stored += layers * states.on_device(RESIDENT) if places.persist else 0
        return steps.estimate(assignment, places) - stored

    several = sharding.devices > 1
    places = resident if several and not sharding.by_layer else streamed
    more = 0 if several else working(policies[0], resident) - working(policies[0], streamed)
    sizes = [(p, working(p, places)) for p in policies]
    return tuple(p.with_working(size + more, size) for p, size in sizes)

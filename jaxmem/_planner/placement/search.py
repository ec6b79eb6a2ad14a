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
from collections.abc import Mapping, Sequence

from jaxmem._core.actions import Actions, Choice
from jaxmem._core.assignment import Assignment
from jaxmem._core.groups import group_label
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._core.progress import LOG
from jaxmem._model.states.places import Places
from jaxmem._planner.placement.layer import ONE_DEVICE, RESIDENT, LayerPolicy, Sharding
from jaxmem._planner.placement.program import (
    PlacementProblem,
    PlacementSolution,
    solve_placement,
)
from jaxmem._planner.placement.steps import PlacedSteps
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._planner.search.trial import Limits, solve_and_compile
from jaxmem.errors import StepError

MOST_COMPILES = 3
MOST_ESTIMATES = 6  # for one solution of the program
ENOUGH = 0.98  # of the budget: a plan that uses so much is not improved on
NEARLY = 0.995  # of the budget: estimates are no more exact


@dataclasses.dataclass(frozen=True)
class PlacedTrial:
    """A solution that was compiled.

    solution: counts of layers by group.
    predicted_bytes: the prediction of its total before the compile.
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
    """A search, with what it learned.

    steps: traces, estimates and compiles.
    profile: the step, with its states in device memory.
    block: the layers whose states are placed.
    others: the actions of all other blocks.
    problem: the problem of the program, without limits and without what was learned.
    limits: the bytes that a plan may take.
    notes: sentences for the user.
    error: by how many bytes compiled steps exceeded their liveness estimates.
    profile_seconds, solve_seconds: the time of tracing and profiling, and the time of the solver.
    tried: the solutions that were compiled.
    refused: the solutions that XLA did not compile.
    """

    steps: PlacedSteps
    profile: Profile
    block: BlockClass
    others: Actions
    problem: PlacementProblem
    limits: Limits
    notes: tuple[str, ...] = ()
    error: int = 0
    profile_seconds: float = 0.0
    solve_seconds: float = 0.0
    tried: list[PlacedTrial] = dataclasses.field(default_factory=list)
    refused: list[PlacementSolution] = dataclasses.field(default_factory=list)
    _estimated: dict = dataclasses.field(default_factory=dict)

    def run(self) -> PlacedTrial | None:
        """The fastest solution that compiles within the limits; None if no solution does."""
        solve_and_compile(self, self.next_solutions)
        if self.tried and not self.fitting:
            self._try_safer()
        return min(self.fitting, key=lambda t: t.solution.cautious_seconds, default=None)

    @property
    def compiles_left(self) -> int:
        """How many solutions may still be compiled."""
        return MOST_COMPILES - len(self.tried)

    def next_solutions(self) -> list[PlacementSolution]:
        """The solution to compile next; none once a plan is good enough, or nothing is new."""
        if self.refused or (self.tried and self._is_enough(self.tried[-1])):
            return []
        found = self.agreed()
        return [] if found is None or self._is_tried(found) else [found]

    def compile_solutions(self, solutions: Sequence[PlacementSolution]) -> None:
        """Compiles solutions, and learns the error of their estimates. A solution that XLA does not
        compile is refused.

        Raises StepError if XLA does not compile the first solution.
        """
        for solution in solutions:
            predicted = self.expected(solution)
            LOG.info("compile %d: %s", len(self.tried) + 1, solution.places)
            try:
                step = self.steps.compile(self.assignment(solution), solution.places)
            except StepError as error:
                # XLA has defects: a solution that meets one takes nothing from those before.
                if not self.tried:
                    raise
                LOG.warning("a plan is left out: %s", str(error)[:400])
                self.refused.append(solution)
                continue
            self.tried.append(PlacedTrial(solution, predicted, step))
            self.error = step.total - self._estimated_of(solution)

    def _try_safer(self) -> None:
        """Compiles, if no trial fits, a solution that is smaller by more than the spread of the
        errors, and the solution of least bytes.
        """
        errors = [t.total - self._estimated_of(t.solution) for t in self.tried]
        self.error = 2 * max(errors) - min(errors)
        for find in (self.agreed, self.least):
            found = find()
            if found is None or self.fitting or self._is_tried(found):
                continue
            if self._estimated_of(found) <= self.limits.usable_bytes:
                self.compile_solutions([found])

    def _is_tried(self, found: PlacementSolution) -> bool:
        return any(found.counts == t.solution.counts for t in self.tried)

    @property
    def fitting(self) -> list[PlacedTrial]:
        return [t for t in self.tried if self.limits.allow(t.step)]

    def agreed(self) -> PlacementSolution | None:
        """The fastest solution that estimates expect to fit. The program's sums are of layers
        alike: the error of the sums for several groups is found by solving again.
        """
        room, best = self.limits.usable_bytes, None
        short = solvable = self.error  # `solvable`: the last one for which there was a solution
        for _ in range(MOST_ESTIMATES):
            found = self._solved(self.within(room, short))
            if found is None:
                short = (solvable + short) // 2
                continue
            solvable = short
            expected = self.expected(found)
            if expected <= room and (
                best is None or found.cautious_seconds < best.cautious_seconds
            ):
                best = found
            # As if the sums' error were the same for the next solution as for this one.
            off = expected - found.device_bytes
            if off == 0 or (expected <= room and off > -(1 - NEARLY) * room):
                break
            short += off
        # No solution is expected to fit: the solution of least bytes may fit.
        return self.least() if best is None else best

    def expected(self, found: PlacementSolution) -> int:
        """Device bytes that a step under a solution is expected to compile to."""
        return self._estimated_of(found) + self.error

    def _estimated_of(self, found: PlacementSolution) -> int:
        return self.estimate(self.assignment(found), found.places)

    def estimate(self, assignment: Assignment, places: Places) -> int:
        """Device bytes of a step by a liveness estimate, which is made once."""
        key = repr(sorted(assignment.actions.items())), places
        if key not in self._estimated:
            self._estimated[key] = self.steps.estimate(assignment, places)
        return self._estimated[key]

    def assignment(self, found: PlacementSolution) -> Assignment:
        """The argument of `build` under a solution."""
        return Assignment(self.actions(found))

    def actions(self, found: PlacementSolution) -> Actions:
        """The choices of each range of layers, and of the other blocks."""
        policies, name = self.problem.policies, self.block.name
        label = lambda a, b: name if len(found.ranges) == 1 else group_label(name, a, b)
        return {
            **self.others,
            **{label(a, b): dict(policies[p].choices) for a, b, p in found.ranges},
        }

    def least(self) -> PlacementSolution | None:
        """The solution of fewest device bytes; None if host memory is too small for any."""
        return solve_placement(self.within(None), "bytes")

    def within(self, room: int | None, short: int = 0) -> PlacementProblem:
        """The problem with limits: `room` bytes of the device, and this search's host memory.

        short: bytes by which the problem's sums are known to be too small.
        """
        host = self.limits.host_bytes
        return dataclasses.replace(self.problem, room=room, host_room=host, short=short)

    def _solved(self, problem: PlacementProblem) -> PlacementSolution | None:
        found = solve_placement(problem)
        self.solve_seconds += 0.0 if found is None else found.solve_seconds
        return found

    def _is_enough(self, trial: PlacedTrial) -> bool:
        """Whether a trial fits, and no faster one is worth a compile: it uses the budget, or no
        solution without a limit is faster.
        """
        if not self.limits.allow(trial.step):
            return False
        if trial.total >= ENOUGH * self.limits.usable_bytes:
            return True
        fastest = self._solved(self.within(None))
        seconds = trial.solution.cautious_seconds
        return fastest is not None and fastest.cautious_seconds >= seconds


def with_working(
    policies: Sequence[LayerPolicy],
    steps: PlacedSteps,
    label: str,
    others: Mapping[str, Mapping[str, Choice]],
    sharding: Sharding = ONE_DEVICE,
) -> tuple[LayerPolicy, ...]:
    """The policies with the working memory of steps all of whose layers have that policy. Each
    policy is estimated with states in host memory, and the first policy with resident states too.

    sharding: how the step is divided. Over several devices, all layers have resident states, or
      layers are gathered one at a time whether their own states are resident or not.
    """
    states = steps.states()
    layers = states.layers
    streamed, resident = Places(layers, 0), Places(layers, layers)

    def working(policy: LayerPolicy, places: Places) -> int:
        assignment = Assignment({**others, label: policy.choices})
        held = states.fixed + states.outside + layers * policy.device_bytes
        held += layers * states.on_device(RESIDENT) if places.persist else 0
        return steps.estimate(assignment, places) - held

    if sharding.devices > 1:
        where = streamed if sharding.by_layer else resident
        both = [(p, working(p, where)) for p in policies]
        return tuple(p.with_working(own, own) for p, own in both)
    more = working(policies[0], resident) - working(policies[0], streamed)
    both = [(p, working(p, streamed)) for p in policies]
    return tuple(p.with_working(own + more, own) for p, own in both)

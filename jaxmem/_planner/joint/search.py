"""One search for counts of layers: solves the program, makes a liveness estimate of its answer,
compiles the answer, and corrects the program by the errors of both.

The working memory of a kind is the working memory of a step whose layers are all of that kind, from
a liveness estimate. A step of several kinds has the largest of their working memories. An estimate
of the answer itself finds the error of this rule, and the program is solved again; compiles find
the error of the estimates. A step has at most three kinds of layers (`MOST_KINDS`), and each kind
has at least two layers.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxmem._core.actions import Actions, Choice
from jaxmem._core.assignment import Assignment
from jaxmem._core.groups import group_label
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._core.progress import LOG
from jaxmem._model.states.places import Places
from jaxmem._planner.joint.steps import PlacedSteps
from jaxmem._planner.placement.layer import RESIDENT, LayerPolicy
from jaxmem._planner.placement.program import PlacementProblem, PlacementSolution, answer
from jaxmem._planner.placement.sharding import ONE_DEVICE, Sharding
from jaxmem._planner.search.compile import CompiledStep
from jaxmem.errors import StepError

MOST_COMPILES = 3
MOST_ESTIMATES = 6  # for one answer of the program
ENOUGH = 0.98  # of the room: a plan that uses so much is not improved on
NEARLY = 0.995  # of the room: estimates are no truer


@dataclasses.dataclass(frozen=True)
class PlacedTrial:
    """An answer that was compiled.

    answer: of the program.
    predicted_bytes: what was said of its total before the compile.
    step: what it compiled to.
    """

    answer: PlacementSolution
    predicted_bytes: int
    step: CompiledStep

    @property
    def total(self) -> int:
        return self.step.total


@dataclasses.dataclass
class PlacementSearch:
    """A search, with what it learns.

    steps: traces, estimates and compiles.
    profile: the step, with its states on the device.
    block: the layers whose states are placed.
    others: the actions of all other blocks.
    question: the problem of the program, without what was learned.
    notes: sentences for the user.
    error: by how many bytes compiled steps took more than their liveness estimates.
    profile_seconds, solve_seconds: the time of tracing and profiling, and the time of the solver.
    tried: the answers that were compiled.
    """

    steps: PlacedSteps
    profile: Profile
    block: BlockClass
    others: Actions
    question: PlacementProblem
    notes: tuple[str, ...] = ()
    error: int = 0
    profile_seconds: float = 0.0
    solve_seconds: float = 0.0
    tried: list[PlacedTrial] = dataclasses.field(default_factory=list)
    _estimated: dict = dataclasses.field(default_factory=dict)

    def run(self) -> PlacedTrial | None:
        """The fastest answer that compiles within the limits; None where the program has none, or
        none compiled within them.
        """
        while len(self.tried) < MOST_COMPILES:
            found = self.agreed()
            if found is None or self._is_tried(found):
                break
            if (trial := self._compiled(found)) is None:
                break
            if self.fits(trial.step) and self._is_enough(found, trial.total):
                break
        if self.tried and not self.fitting:
            self._try_safer()
        return min(self.fitting, key=lambda t: t.answer.cautious_seconds, default=None)

    def _try_safer(self) -> None:
        """Where compiles taught unlike errors, and none was within the room: tries an answer that
        fits by more than these errors differ, and the least.
        """
        errors = [t.total - self._estimated_of(t.answer) for t in self.tried]
        self.error = 2 * max(errors) - min(errors)
        for find in (self.agreed, self.least):
            found = find()
            if found is None or self.fitting or self._is_tried(found):
                continue
            if self.question.room is None or self._estimated_of(found) <= self.question.room:
                self._compiled(found)

    def _compiled(self, found: PlacementSolution) -> PlacedTrial | None:
        """Compiles an answer, and learns from it; None where XLA refuses it, and others were
        compiled before.
        """
        predicted = self.expected(found)
        LOG.info("compile %d: %s", len(self.tried) + 1, found.places)
        try:
            step = self.steps.compile(self.assignment(found), found.places)
        except StepError as error:
            # XLA has defects: one answer that meets them takes nothing from those before.
            if not self.tried:
                raise
            LOG.warning("a plan is left out: %s", str(error)[:400])
            return None
        self.tried.append(PlacedTrial(found, predicted, step))
        self.error = self.tried[-1].total - self._estimated_of(found)
        return self.tried[-1]

    def _is_tried(self, found: PlacementSolution) -> bool:
        return any(found.counts == t.answer.counts for t in self.tried)

    @property
    def fitting(self) -> list[PlacedTrial]:
        return [t for t in self.tried if self.fits(t.step)]

    def fits(self, step: CompiledStep) -> bool:
        room, host_room = self.question.room, self.question.host_room
        on_device = room is None or step.total <= room
        return on_device and (host_room is None or step.host_bytes <= host_room)

    def agreed(self) -> PlacementSolution | None:
        """The fastest answer that estimates expect to fit. The program's sums are of layers alike:
        what an answer of several kinds takes less or more is found by asking again.
        """
        room, short, best = self.question.room, self.question.short + self.error, None
        if room is None:
            return self._solved(dataclasses.replace(self.question, short=short))
        answered = short  # for which there was an answer, the last time
        for _ in range(MOST_ESTIMATES):
            found = self._solved(dataclasses.replace(self.question, short=short))
            if found is None:
                short = (answered + short) // 2
                continue
            answered = short
            expected = self.expected(found)
            if expected <= room and (
                best is None or found.cautious_seconds < best.cautious_seconds
            ):
                best = found
            # As if the program's sums were as far off for the next answer as for this one.
            off = expected - found.device_bytes
            if off == 0 or (expected <= room and off > -(1 - NEARLY) * room):
                break
            short += off
        # Nothing that the program answered is expected to fit: the least may.
        return self.least() if best is None else best

    def expected(self, found: PlacementSolution) -> int:
        """Bytes of the device that a step under an answer is expected to compile to."""
        return self._estimated_of(found) + self.error

    def _estimated_of(self, found: PlacementSolution) -> int:
        return self.estimate(self.assignment(found), found.places)

    def estimate(self, assignment: Assignment, places: Places) -> int:
        key = repr(sorted(assignment.actions.items())), places
        if key not in self._estimated:
            self._estimated[key] = self.steps.estimate(assignment, places)
        return self._estimated[key]

    def assignment(self, found: PlacementSolution) -> Assignment:
        """What `build` is given."""
        return Assignment(self.actions(found))

    def actions(self, found: PlacementSolution) -> Actions:
        """The choices of each group of layers, and those of other blocks."""
        ways, groups = self.question.ways, found.ways
        name = self.block.name
        of = lambda a, b: name if len(groups) == 1 else group_label(name, a, b)
        return {**self.others, **{of(a, b): dict(ways[w].choices) for a, b, w in groups}}

    def least(self) -> PlacementSolution | None:
        """The answer of fewest device bytes; None where host memory has room for none."""
        return answer(dataclasses.replace(self.question, room=None), "bytes")

    def _solved(self, question: PlacementProblem) -> PlacementSolution | None:
        found = answer(question)
        self.solve_seconds += 0.0 if found is None else found.solve_seconds
        return found

    def _is_enough(self, found: PlacementSolution, total: int) -> bool:
        """Whether nothing faster is to be looked for: the room is used, or more of it changes
        nothing.
        """
        room = self.question.room
        if room is None or total >= ENOUGH * room:
            return True
        fastest = self._solved(dataclasses.replace(self.question, room=None))
        return fastest is not None and fastest.cautious_seconds >= found.cautious_seconds


def with_working(
    ways: Sequence[LayerPolicy],
    steps: PlacedSteps,
    label: str,
    others: Mapping[str, Mapping[str, Choice]],
    sharding: Sharding = ONE_DEVICE,
) -> tuple[LayerPolicy, ...]:
    """The ways with the working memory of steps all of whose layers go that way: each is
    estimated with states in host memory, and the first one with resident states too.

    sharding: how the step is divided. Over several devices states are resident in all layers, or
      layers are gathered one at a time whether their own states are resident or not.
    """
    states = steps.states()
    layers = states.layers
    streamed, resident = Places(layers, 0), Places(layers, layers)

    def beside(way: LayerPolicy, places: Places) -> int:
        assignment = Assignment({**others, label: way.choices})
        held = states.fixed + states.outside + layers * way.device_bytes
        held += layers * states.on_device(RESIDENT) if places.persist else 0
        return steps.estimate(assignment, places) - held

    if sharding.devices > 1:
        where = streamed if sharding.by_layer else resident
        return tuple(w.with_working(own, own) for w in ways for own in [beside(w, where)])
    apart = beside(ways[0], resident) - beside(ways[0], streamed)
    return tuple(w.with_working(own + apart, own) for w in ways for own in [beside(w, streamed)])

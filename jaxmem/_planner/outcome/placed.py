"""Makes of a search for placed states a plan, or the error that names the least bytes."""

import dataclasses
from collections.abc import Sequence

import jax

from jaxmem._core.actions import KEEP, REST
from jaxmem._core.bytes import show_bytes
from jaxmem._core.groups import as_decided
from jaxmem._model.states.places import DEVICE, HOST
from jaxmem._planner.joint.search import PlacedTrial, PlacementSearch
from jaxmem._planner.outcome.pareto import whole_actions
from jaxmem._planner.outcome.searched import option_notes
from jaxmem._planner.outcome.table import rows
from jaxmem._planner.placement.front import way_of
from jaxmem._planner.placement.layer import RESIDENT, LayerGroup, LayerPolicy, States
from jaxmem._planner.placement.program import PlacementProblem, PlacementSolution, answer, priced
from jaxmem._planner.search.step_time import outside_blocks
from jaxmem._planner.search.trial import Limits
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.problem import Problem
from jaxmem._result.plan.plan import Plan
from jaxmem._result.plan.rows import Bytes, Point
from jaxmem._result.plan.timeline import Timeline
from jaxmem.errors import BudgetError

POINTS = 8  # budgets that the curve is solved for
TAKEN = "states take the link, or the memory, that it needs"
KEPT = "everything that the layer saves is kept"
NOT_COMPILED = (
    "the step without a plan, all of whose states are on the device, was not compiled: its bytes"
    " are those of a liveness estimate of its trace"
)


def outcome(
    search: PlacementSearch,
    best: PlacedTrial,
    limits: Limits,
    notes: tuple[str, ...],
    others: Sequence[PlacementSearch] = (),
) -> Plan:
    """The plan of a trial.

    others: the step read in other ways, which were searched too.
    """
    block, profile = search.block, search.profile
    target, question = search.steps.backend.target, search.question
    made = [search, *others]
    chosen = search.actions(best.answer)
    decided = dataclasses.replace(profile, blocks=as_decided(profile.blocks, chosen))
    saved = evaluate(decided, {k: v for k, v in chosen.items() if k not in profile.idle_blocks})
    outside = _seconds_outside(search, best)
    kept = way_of(profile, block, {REST: KEEP})
    everything = _all_kept(question, kept) + outside
    baseline = max(search.steps.estimate(None, search.steps.resident) + search.error, 0)
    arguments = best.step.compiled.argument_bytes
    seconds = best.answer.seconds + outside
    return Plan(
        actions={label: {} for label in profile.idle_blocks} | whole_actions(decided, chosen),
        budget_bytes=limits.budget,
        predicted_bytes=best.predicted_bytes,
        compiled_bytes=best.total,
        baseline_bytes=baseline,
        host_bytes=best.step.host_bytes,
        predicted_seconds=seconds,
        baseline_seconds=everything,
        uncertain_seconds=profile.uncertainty * abs(seconds - everything),
        profile_seconds=sum(one.profile_seconds for one in made),
        solve_seconds=sum(one.solve_seconds for one in made),
        compile_seconds=sum(one.steps.seconds for one in made),
        compiles=sum(one.steps.compiles for one in made),
        time_source=profile.time_source,
        target=str(target),
        fingerprint=profile.fingerprint,
        jax_version=jax.__version__,
        parts=Bytes.of(best.total, arguments, saved.saved_bytes),
        baseline_parts=Bytes.of(
            baseline, _resident(question.states), block.layers * kept.device_bytes
        ),
        rows=rows(Problem(decided, saved.saved_bytes), chosen, TAKEN, KEPT),
        points=_curve(search, outside),
        notes=(*notes, *search.notes, NOT_COMPILED, *option_notes(best.step.compiled.options)),
        compiler_options=best.step.compiled.options,
        places=best.answer.places,
        divided=question.sharding.divided if question.sharding.devices > 1 else None,
        lanes=timeline_of(question, best.answer, outside),
    ).with_step(best.step.compiled.executable, search.steps.split, search.steps.create)


def _all_kept(question: PlacementProblem, kept: LayerPolicy) -> float:
    """Seconds of the layers where all states are on the device, and all tensors kept there."""
    one = dataclasses.replace(question, ways=(kept.with_working(0, 0),))
    return priced(one, {LayerGroup(RESIDENT, 0): question.states.layers}, DEVICE).seconds


def _resident(states: States) -> int:
    return states.fixed + states.outside + states.layers * states.layer


def _seconds_outside(search: PlacementSearch, best: PlacedTrial) -> float:
    """Seconds of a step outside the stack's layers, from XLA's estimate of the compiled step, which
    knows no copies to host memory; without one by its matrix products and its arguments.
    """
    question, compiled = search.question, best.step.compiled
    counts = best.answer.counts.items()
    layers = sum(n * question.microbatches * question.ways[k.way].seconds for k, n in counts)
    if compiled.xla_seconds is not None:
        return max(0.0, compiled.xla_seconds - layers)
    states, target = _resident(question.states), search.steps.backend.target
    return outside_blocks(search.profile, compiled.matmul_flops, states, target)


def _curve(search: PlacementSearch, outside: float) -> tuple[Point, ...]:
    """Least seconds against bytes of the device, as predicted, by rising bytes."""
    question = dataclasses.replace(search.question, short=search.error)
    least, most = search.least(), answer(dataclasses.replace(question, room=None))
    if least is None or most is None:
        return ()
    low, high = least.device_bytes + search.error, most.device_bytes
    rooms = [low + (high - low) * i // (POINTS - 1) for i in range(POINTS)]
    found: list[PlacementSolution] = []
    for room in rooms:
        one = answer(dataclasses.replace(question, room=room))
        if one is not None and (not found or one.seconds < found[-1].seconds):
            found.append(one)
    # Estimates may be off by more than the least answer takes.
    size = lambda a: max(0, a.device_bytes)
    return tuple(Point(size(a), a.seconds + outside, search.actions(a)) for a in found)


def infeasible(search: PlacementSearch, limits: Limits) -> BudgetError:
    """The error that names the least bytes, on the device and in host memory."""
    least, states = search.least(), search.question.states
    target = search.steps.backend.target
    given, host = show_bytes(limits.budget), show_bytes(limits.host_bytes)
    if least is None:
        needed = show_bytes(states.layers * states.layer)
        return BudgetError(
            f"plan: `budget` is {given}, and `host_budget` {host} for target {str(target)!r}: no"
            " placement of the states needs so little host memory and fits the device; the layers'"
            f" states take {needed} in all; expected more of either",
            least_bytes=None,
        )
    over = [t.total for t in search.tried if t.total > limits.usable_bytes]
    bytes_ = min([search.expected(least), *over])
    return BudgetError(
        f"plan: `budget` is {given}, and `host_budget` {host} for target {str(target)!r}: the least"
        f" that is expected to compile is {show_bytes(bytes_)} ({bytes_} bytes) on the device, with"
        f" {show_bytes(least.host_bytes)} in host memory, {least.places}; expected a larger budget:"
        " smaller microbatches and a chunked loss need less",
        least_bytes=bytes_,
    )


def timeline_of(question: PlacementProblem, found: PlacementSolution, outside: float) -> Timeline:
    """The lanes of a step under an answer of the program.

    outside: seconds of the work outside the layers.
    """
    states = question.states
    counts = found.counts.items()
    groups = [dataclasses.replace(question.lanes(kind), count=n) for kind, n in counts]
    layers = sum(n * question.seconds(kind) for kind, n in counts)
    hosted = found.outer == HOST
    return Timeline(
        microbatches=question.microbatches,
        groups=tuple(groups),
        alone_seconds=max(0.0, found.seconds - layers),  # a difference of sums, which is rounded
        outside_seconds=outside,
        outer_device_bytes=0 if hosted else states.outside,
        outer_host_bytes=states.outside if hosted else 0,
    )

"""Makes the plan of a search over placements."""

import dataclasses
from collections.abc import Sequence

import jax

from jaxmem._core.actions import KEEP, UNTAGGED
from jaxmem._core.assignment import Assignment
from jaxmem._core.groups import as_decided
from jaxmem._model.states.places import DEVICE, HOST
from jaxmem._planner.outcome.pareto import front, whole_actions
from jaxmem._planner.outcome.searched import option_notes
from jaxmem._planner.outcome.table import rows
from jaxmem._planner.placement.front import layer_policy
from jaxmem._planner.placement.layer import RESIDENT, LayerGroup, LayerPolicy
from jaxmem._planner.placement.program import PlacementProblem, PlacementSolution, solve_placement
from jaxmem._planner.placement.search import PlacedTrial, PlacementSearch
from jaxmem._planner.search.step_time import outside_blocks
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._result.plan.plan import Plan
from jaxmem._result.plan.rows import Bytes, Point
from jaxmem._result.plan.timeline import Timeline

POINTS = 8  # budgets for which the points of the curve are solved
TAKEN = "states take the link, or the memory, that it needs"
KEPT = "everything that the layer saves is kept"
NOT_COMPILED = (
    "the step without a plan, all of whose states are on the device, was not compiled: its bytes"
    " are those of a liveness estimate of its trace"
)


def placed_plan(
    search: PlacementSearch,
    best: PlacedTrial,
    notes: tuple[str, ...],
    others: Sequence[PlacementSearch] = (),
) -> Plan:
    """The plan of a trial.

    search, best: the search, and its fastest trial that fits.
    notes: sentences for the user.
    others: the searches under other shardings, whose time the plan reports too.
    """
    block, profile = search.block, search.profile
    target, problem = search.steps.backend.target, search.problem
    searches = [search, *others]
    chosen = search.actions(best.solution)
    decided = dataclasses.replace(profile, blocks=as_decided(profile.blocks, chosen))
    saved = evaluate(decided, {k: v for k, v in chosen.items() if k not in profile.idle_blocks})
    outside = _seconds_outside(search, best)
    kept = layer_policy(profile, block, {UNTAGGED: KEEP})
    everything = _all_kept(problem, kept) + outside
    kept_bytes = search.steps.estimate(Assignment.unchanged(), search.steps.resident)
    baseline = max(kept_bytes + search.error, 0)
    arguments = best.step.compiled.argument_bytes
    free = max(0, search.limits.usable_bytes - best.total)
    seconds = best.solution.seconds + outside
    return Plan(
        actions={label: {} for label in profile.idle_blocks} | whole_actions(decided, chosen),
        budget_bytes=search.limits.budget,
        predicted_bytes=best.predicted_bytes,
        compiled_bytes=best.total,
        baseline_bytes=baseline,
        host_bytes=best.step.host_bytes,
        predicted_seconds=seconds,
        baseline_seconds=everything,
        uncertain_seconds=profile.uncertainty * abs(seconds - everything),
        profile_seconds=sum(one.profile_seconds for one in searches),
        solve_seconds=sum(one.solve_seconds for one in searches),
        compile_seconds=sum(one.steps.seconds for one in searches),
        compiles=sum(one.steps.compiles for one in searches),
        time_source=profile.time_source,
        target=str(target),
        fingerprint=profile.fingerprint,
        jax_version=jax.__version__,
        parts=Bytes.of(best.total, arguments, saved.saved_bytes),
        baseline_parts=Bytes.of(
            baseline, problem.states.resident, block.layers * kept.device_bytes
        ),
        rows=rows(ActionProblem(decided, saved.saved_bytes + free), chosen, TAKEN, KEPT),
        points=_curve(search, outside),
        notes=(*notes, *search.notes, NOT_COMPILED, *option_notes(best.step.compiled.options)),
        compiler_options=best.step.compiled.options,
        places=best.solution.places,
        moments=search.steps.moments,
        divided=problem.sharding.divided if problem.sharding.devices > 1 else None,
        lanes=timeline_of(problem, best.solution, outside),
    ).with_step(best.step.compiled.executable, search.steps.split, search.steps.create)


def _all_kept(problem: PlacementProblem, kept: LayerPolicy) -> float:
    """Seconds of the layers if all states and all saved tensors are in device memory."""
    one = dataclasses.replace(problem, policies=(kept.with_working(0, 0),))
    counts = {LayerGroup(RESIDENT, 0): problem.states.layers}
    return PlacementSolution.of(one, counts, DEVICE).seconds


def _seconds_outside(search: PlacementSearch, best: PlacedTrial) -> float:
    """Seconds of a step outside the stack's layers, without the seconds that the assignment of the
    other blocks adds: XLA's estimate of the compiled step, which leaves out copies to host memory,
    less the seconds of the layers. Without an estimate of XLA, the seconds follow from the
    profile's times of the other blocks, from the matrix products outside the blocks, and from the
    step's arguments.
    """
    problem, profile, compiled = search.problem, search.profile, best.step.compiled
    counts, times = best.solution.counts.items(), problem.microbatches
    layers = sum(n * times * problem.policies[g.policy].seconds for g, n in counts)
    if compiled.xla_seconds is not None:
        return max(0.0, compiled.xla_seconds - layers - best.solution.others.seconds)
    states, target = problem.states.resident, search.steps.backend.target
    blocks = (b for b in profile.blocks if b is not search.block)
    others = sum(b.runs * (b.forward_seconds + b.backward_seconds) for b in blocks)
    return others + outside_blocks(profile, compiled.matmul_flops, states, target)


def _curve(search: PlacementSearch, outside: float) -> tuple[Point, ...]:
    """The curve of least predicted seconds against predicted device bytes, by rising bytes."""
    solved = lambda room: solve_placement(search.within(room, search.error))
    least, most = search.least(), solved(None)
    if least is None or most is None:
        return ()
    low, high = least.device_bytes + search.error, most.device_bytes
    rooms = [low + (high - low) * i // (POINTS - 1) for i in range(POINTS)]
    solutions = [one for one in map(solved, rooms) if one is not None]
    # The error of estimates may exceed the bytes of the least solution, hence the maximum.
    size = lambda s: max(0, s.device_bytes)
    return front(Point(size(s), s.seconds + outside, search.actions(s)) for s in solutions)


def timeline_of(problem: PlacementProblem, found: PlacementSolution, outside: float) -> Timeline:
    """The lanes of a step under a solution of the program.

    outside: seconds of the work outside the layers.
    """
    states = problem.states
    counts = found.counts.items()
    groups = [dataclasses.replace(problem.lanes(group), count=n) for group, n in counts]
    layers = sum(n * problem.seconds(group) for group, n in counts)
    hosted = found.outer == HOST
    return Timeline(
        microbatches=problem.microbatches,
        groups=tuple(groups),
        # A difference of sums, which is rounded.
        alone_seconds=max(0.0, found.seconds - found.others.seconds - layers),
        outside_seconds=outside + found.others.seconds,
        outer_device_bytes=0 if hosted else states.outside,
        outer_host_bytes=states.outside if hosted else 0,
    )

"""Plans what layers do and where their states lie, together (ProTrain §4, with the actions of
single tensors).
"""

import dataclasses
from collections.abc import Collection

import jax

from jaxmem._core.actions import KEEP, REST, Actions
from jaxmem._core.bytes import show_bytes
from jaxmem._core.groups import as_decided
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._core.progress import LOG
from jaxmem._counts.front import front, way_of
from jaxmem._counts.lanes import Link
from jaxmem._counts.layer import States
from jaxmem._counts.program import Answer, Question, answer
from jaxmem._device.target import Target
from jaxmem._joint.search import Search, Trial, with_working
from jaxmem._joint.steps import PlacedSteps
from jaxmem._plan.plan import Plan
from jaxmem._plan.rows import Bytes, Point
from jaxmem._planner.lanes import timeline_of
from jaxmem._planner.outcome import option_notes
from jaxmem._planner.pareto import whole_actions
from jaxmem._planner.read import Read, read_step
from jaxmem._planner.table import rows
from jaxmem._search.candidates import fastest
from jaxmem._search.clock import outside_blocks
from jaxmem._search.trials import Limits
from jaxmem._solver.cost import evaluate
from jaxmem._solver.problem import Problem
from jaxmem._states.places import Places
from jaxmem._xla.backend import Backend
from jaxmem.errors import BudgetError, StepError, TargetError

DECIDED = ("actions", "states")
POINTS = 8  # budgets that the curve is solved for
TAKEN = "states take the link, or the memory, that it needs"
KEPT = "everything that the layer saves is kept"
NOT_COMPILED = (
    "the step without a plan, all of whose states are on the device, was not compiled: its bytes"
    " are those of a walk through its trace"
)


def check_decide(decide: Collection[str], target: Target, measure: float | None) -> bool:
    """Whether states are to be placed. Raises StepError for a `decide` that names anything unknown,
    TargetError for a target for which they cannot be.
    """
    names = {decide} if isinstance(decide, str) or decide is None else set(decide)
    if not names <= set(DECIDED) or "actions" not in names:
        raise StepError(
            f"plan: `decide` is {decide!r}; expected ('actions',), or ('actions', 'states') for a"
            " released step whose states may lie in host memory"
        )
    if "states" not in names:
        return False
    if target.devices > 1:
        raise TargetError(
            f"plan: `decide` has 'states', and `target` is {str(target)!r}; expected one device:"
            " states that are divided over several are placed by hand, by `split`"
        )
    if measure is not None:
        raise StepError(
            f"plan: `measure` is {measure}, and `decide` has 'states', whose steps take arguments"
            " of other places each; expected measure=None"
        )
    return True


@dataclasses.dataclass(frozen=True)
class Asked:
    """A step whose states are to be placed.

    search: that for a plan, not begun.
    step: what was read of it, its states on the device.
    block: the layers.
    """

    search: Search
    step: Read
    block: BlockClass


def plan_places(
    build, args: tuple, backend: Backend, limits: Limits, actions, codecs, notes: tuple[str, ...]
) -> Plan:
    """Makes the plan for one number of microbatches. The arguments are those of `_plan`."""
    asked = read_places(build, args, backend, limits, actions, codecs)
    best = asked.search.run()
    if best is None:
        raise _infeasible(asked.search, limits, backend.target)
    return _outcome(asked, best, limits, notes + asked.step.notes)


def read_places(build, args: tuple, backend: Backend, limits: Limits, actions, codecs) -> Asked:
    """Reads a step, profiles it with resident states, and walks through it with streamed ones."""
    allowed, named = actions
    steps = PlacedSteps(build, args, backend)
    states = steps.states()
    resident = Places(states.layers, states.layers)
    step = read_step(build, steps.args_at(resident), backend, None, allowed, named, codecs)
    profile, block = step.profile, _stack_of(step.profile, steps)
    others = _others(profile, block)
    others |= {label: {} for label in profile.idle_blocks}
    target = backend.target
    LOG.info("walking through the step, its layers' states in host memory")
    question = Question(
        states,
        with_working(front(profile, block), steps, block.name, others),
        Link(*(target.link_ways or (target.link, target.link))),
        block.runs // block.layers,
        limits.room,
        limits.host_room,
    )
    return Asked(Search(steps, block.name, others, question), step, block)


def _stack_of(profile: Profile, steps: PlacedSteps) -> BlockClass:
    """The block of the layers whose states are placed. Raises StepError where it is not one."""
    found = [b for b in profile.blocks if b.name == steps.label]
    if len(found) != 1 or found[0].layers != steps.layers:
        known = ", ".join(f"{b.name!r} of {b.layers}" for b in profile.blocks)
        raise StepError(
            f"plan: the step has {steps.layers} layers of states, of the block {steps.label!r}, and"
            f" its blocks are {known}; expected one block of this label, with as many layers: give"
            " `plan` to released_step, and other blocks other labels"
        )
    return found[0]


def _others(profile: Profile, block: BlockClass) -> Actions:
    """What is decided of the blocks beside the stack: what is fastest."""
    blocks = tuple(b for b in profile.blocks if b is not block)
    found = fastest(Problem(dataclasses.replace(profile, blocks=blocks))) if blocks else None
    return {} if found is None else dict(found.actions)


def _outcome(asked: Asked, best: Trial, limits: Limits, notes: tuple[str, ...]) -> Plan:
    search, step, block = asked.search, asked.step, asked.block
    profile, target, question = step.profile, step.target, search.question
    chosen = search.actions(best.answer)
    decided = dataclasses.replace(profile, blocks=as_decided(profile.blocks, chosen))
    saved = evaluate(decided, {k: v for k, v in chosen.items() if k not in profile.idle_blocks})
    outside = _seconds_outside(search, best, profile, target)
    kept = way_of(profile, block, {REST: KEEP})
    everything = question.microbatches * question.states.layers * kept.seconds + outside
    whole = Places(question.states.layers, question.states.layers)
    baseline = max(search.steps.walked(None, whole) + search.error, 0)
    arguments = best.placed.compiled.argument_bytes
    if target.platform == "cpu":
        arguments -= best.placed.host_bytes
    seconds = best.answer.seconds + outside
    return Plan(
        actions={label: {} for label in profile.idle_blocks} | whole_actions(decided, chosen),
        budget_bytes=limits.budget,
        predicted_bytes=best.predicted_bytes,
        compiled_bytes=best.placed.total_bytes,
        baseline_bytes=baseline,
        host_bytes=best.placed.host_bytes,
        predicted_seconds=seconds,
        baseline_seconds=everything,
        uncertain_seconds=profile.uncertainty * abs(seconds - everything),
        profile_seconds=step.seconds,
        solve_seconds=search.solve_seconds,
        compile_seconds=search.steps.seconds,
        compiles=search.steps.compiles,
        time_source=profile.time_source,
        target=str(target),
        fingerprint=profile.fingerprint,
        jax_version=jax.__version__,
        parts=Bytes.of(best.placed.total_bytes, arguments, saved.saved_bytes),
        baseline_parts=Bytes.of(
            baseline, _resident(question.states), block.layers * kept.device_bytes
        ),
        rows=rows(Problem(decided, saved.saved_bytes), chosen, TAKEN, KEPT),
        points=_curve(search, outside),
        notes=(*notes, NOT_COMPILED, *option_notes(best.placed.compiled.options)),
        compiler_options=best.placed.compiled.options,
        places=best.answer.places,
        lanes=timeline_of(question, best.answer, outside),
    ).with_step(best.placed.executable, search.steps.split)


def _resident(states: States) -> int:
    return states.fixed + states.outside + states.layers * states.layer


def _seconds_outside(search: Search, best: Trial, profile: Profile, target: Target) -> float:
    """Seconds of a step outside the stack's layers, from XLA's estimate of the compiled step, which
    knows no copies to host memory; without one by its matrix products and its arguments.
    """
    question, compiled = search.question, best.placed.compiled
    counts = best.answer.counts.items()
    layers = sum(n * question.microbatches * question.ways[k.way].seconds for k, n in counts)
    if compiled.xla_seconds is not None:
        return max(0.0, compiled.xla_seconds - layers)
    return outside_blocks(profile, compiled.matmul_flops, _resident(question.states), target)


def _curve(search: Search, outside: float) -> tuple[Point, ...]:
    """Least seconds against bytes of the device, as predicted, by rising bytes."""
    question = dataclasses.replace(search.question, short=search.error)
    least, most = search.least(), answer(dataclasses.replace(question, room=None))
    if least is None or most is None:
        return ()
    low, high = least.device_bytes + search.error, most.device_bytes
    rooms = [low + (high - low) * i // (POINTS - 1) for i in range(POINTS)]
    found: list[Answer] = []
    for room in rooms:
        one = answer(dataclasses.replace(question, room=room))
        if one is not None and (not found or one.seconds < found[-1].seconds):
            found.append(one)
    return tuple(Point(a.device_bytes, a.seconds + outside, search.actions(a)) for a in found)


def _infeasible(search: Search, limits: Limits, target: Target) -> BudgetError:
    """The error that names the least bytes, on the device and in host memory."""
    least, states = search.least(), search.question.states
    given, host = show_bytes(limits.budget), show_bytes(limits.host_room)
    if least is None:
        needed = show_bytes(states.layers * states.layer)
        return BudgetError(
            f"plan: `budget` is {given}, and `host_budget` {host} for target {str(target)!r}: no"
            " placement of the states needs so little host memory and fits the device; the layers'"
            f" states take {needed} in all; expected more of either",
            least_bytes=None,
        )
    over = [t.placed.total_bytes for t in search.tried if t.placed.total_bytes > limits.room]
    bytes_ = min([search.expected(least), *over])
    return BudgetError(
        f"plan: `budget` is {given}, and `host_budget` {host} for target {str(target)!r}: the least"
        f" that is expected to compile is {show_bytes(bytes_)} ({bytes_} bytes) on the device, with"
        f" {show_bytes(least.host_bytes)} in host memory, {least.places}; expected a larger budget:"
        " smaller microbatches and a chunked loss need less",
        least_bytes=bytes_,
    )

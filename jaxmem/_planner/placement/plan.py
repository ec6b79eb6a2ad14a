"""Plans what layers do, where their states lie and what is divided over devices, together
(ProTrain §4, with the actions of single tensors).
"""

import dataclasses
from collections.abc import Collection

from jaxmem._core.actions import Actions
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._core.progress import LOG
from jaxmem._cost.profile.options import Allowed
from jaxmem._model.states.places import DIVIDED, DIVIDED_WORDS
from jaxmem._model.states.within import opened
from jaxmem._optim.released.direct import Direct
from jaxmem._planner.outcome.placed import infeasible, outcome
from jaxmem._planner.placement.front import front
from jaxmem._planner.placement.layer import (
    GATHERED_BESIDE,
    LAYERS,
    LESS_BESIDE,
    NOTHING,
    ONE_DEVICE,
    PLACES,
    RESIDENT,
    Link,
    Sharding,
)
from jaxmem._planner.placement.program import PlacementProblem, solve_placement
from jaxmem._planner.placement.search import PlacedTrial, PlacementSearch, with_working
from jaxmem._planner.placement.steps import PlacedSteps
from jaxmem._planner.read import read_step
from jaxmem._planner.search.candidates import fastest
from jaxmem._planner.search.trial import Limits
from jaxmem._planner.solve.problem import Problem
from jaxmem._result.plan.plan import Plan
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.devices.target import Target
from jaxmem.errors import OptimizerError, StepError, TargetError

ACTIONS, STATES, SHARDING, MICROBATCHES = DECIDED = (
    "actions", "states", "sharding", "microbatches",
)  # fmt: skip


def check_decide(decide: Collection[str], target: Target, measure: float | None) -> frozenset[str]:
    """The names of what a plan decides, some of `DECIDED`. Raises StepError for a `decide` that
    names anything else, TargetError for a target for which it cannot be decided.
    """
    several = isinstance(decide, Collection) and not isinstance(decide, str)
    names = frozenset(map(str, decide)) if several else frozenset({str(decide)})
    states, sharding = STATES in names, SHARDING in names
    if not names <= set(DECIDED) or ACTIONS not in names or (sharding and not states):
        raise StepError(
            f"plan: `decide` is {decide!r}; expected ('actions',), or ('actions', 'states') for a"
            " released step whose states may lie in host memory, or ('actions', 'states',"
            " 'sharding') for one that is divided over several devices; and 'microbatches' in any"
        )
    if not states:
        return names
    if target.devices > 1 and not sharding:
        raise TargetError(
            f"plan: `decide` has 'states', and `target` is {str(target)!r}; expected one device, or"
            " 'sharding' in `decide` too: what is divided over several says where it lies"
        )
    if target.devices == 1 and sharding:
        raise TargetError(
            f"plan: `decide` has 'sharding', and `target` is {str(target)!r}; expected several"
            " devices, as in 'h200:8', or `decide` without it"
        )
    if measure is not None:
        raise StepError(
            f"plan: `measure` is {measure}, and `decide` has 'states', whose steps take arguments"
            " of other places each; expected measure=None"
        )
    return names


def plan_places(
    build,
    args: tuple,
    backend: Backend,
    limits: Limits,
    allowed: Allowed,
    notes: tuple[str, ...],
    decide: Collection[str],
) -> Plan:
    """Makes the plan for one number of microbatches. The arguments are those of `_plan`.

    decide: the names of what is decided, as `check_decide` returns them.
    """
    if SHARDING not in decide:
        search = read_places(build, args, backend, limits, allowed)
        if (best := search.run()) is None:
            raise infeasible(search)
        return outcome(search, best, notes)
    every = _every_sharding(build, args, backend, limits, allowed)
    return _fastest(every, notes)


def _every_sharding(
    build, args, backend: Backend, limits: Limits, allowed: Allowed
) -> list[PlacementSearch]:
    """The step read under each way to divide it that its optimizer takes. Raises OptimizerError
    where it takes none.
    """
    target = backend.target
    released, _ = opened(build(None))
    accumulates = not isinstance(getattr(released, "optimizer", None), Direct)
    # XLA schedules by prices where it has them.
    beside = GATHERED_BESIDE if target.chip is not None and target.chip.priced else LESS_BESIDE
    found, refused = [], None
    # Other optimizers than AdamA gather by layer whatever they are told.
    for how in DIVIDED if accumulates else (NOTHING, LAYERS):
        sharding = Sharding(how, target.devices, target.peers, accumulates, beside)
        try:
            found.append(read_places(build, args, backend, limits, allowed, sharding))
        except OptimizerError as error:
            refused = refused or error
    if not found:
        assert refused is not None
        raise refused
    return found


def _fastest(every: list[PlacementSearch], notes: tuple[str, ...]) -> Plan:
    """The plan of the sharding under which a step is fastest. A sharding that the program expects
    to be slower than the fastest compiled plan is not compiled.
    """
    found: list[tuple[PlacementSearch, PlacedTrial]] = []
    pairs = ((s, solve_placement(s.within(s.limits.usable_bytes))) for s in every)
    expected = [(search, one.cautious_seconds) for search, one in pairs if one is not None]
    refused: StepError | None = None
    for search, seconds in sorted(expected, key=lambda pair: pair[1]):
        if found and min(map(_seconds, found)) <= seconds:
            break
        try:
            best = search.run()
        except StepError as error:  # XLA has defects: other ways to divide the step may not meet it
            LOG.warning("a way to divide the step is left out: %s", str(error)[:400])
            refused = error
            continue
        if best is not None:
            found.append((search, best))
    if not found:
        least = lambda search: one.device_bytes if (one := search.least()) else float("inf")
        nearest = min(every, key=least)
        # The program may have no solution, and the step still fit: its least was not compiled yet.
        best = None if nearest.tried else nearest.run()
        if best is None:
            if refused is not None and not nearest.tried:
                raise refused
            raise infeasible(nearest)
        found.append((nearest, best))
    search, best = min(found, key=_seconds)
    return outcome(search, best, notes, [one for one in every if one is not search])


def _seconds(pair: tuple[PlacementSearch, PlacedTrial]) -> float:
    return pair[1].solution.cautious_seconds


def read_places(
    build,
    args: tuple,
    backend: Backend,
    limits: Limits,
    allowed: Allowed,
    sharding: Sharding = ONE_DEVICE,
) -> PlacementSearch:
    """Reads a step, profiles it with resident states, and estimates it with streamed ones."""
    several = sharding.devices > 1
    steps = PlacedSteps(build, args, backend, sharding.divided if several else None)
    states = steps.states()
    sharding = dataclasses.replace(sharding, devices=steps.devices)
    moves = sharding.by_layer or not several  # else all states stay on their devices
    places = PLACES if moves else (RESIDENT,)
    there = steps.args_at(steps.resident)
    step = read_step(steps.build, there, backend, None, allowed)
    profile, block = step.profile, _stack_of(step.profile, steps)
    others = _others(profile, block)
    others |= {label: {} for label in profile.idle_blocks}
    target = backend.target
    over = f", divided over devices: {DIVIDED_WORDS[sharding.divided]}" if several else ""
    in_host = ", its layers' states in host memory" if len(places) > 1 else ""
    LOG.info("estimating the step%s%s", in_host, over)
    problem = PlacementProblem(
        states,
        with_working(front(profile, block), steps, block.name, others, sharding),
        Link(*backend.link, beside=target.traits.host_is_apart),
        block.runs // block.layers,
        places=places,
        sharding=sharding,
        outer_moves=moves,
    )
    return PlacementSearch(
        steps, profile, block, others, problem, limits, step.notes, profile_seconds=step.seconds
    )


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

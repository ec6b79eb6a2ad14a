"""Plans the actions of layers, the places of their states, and the division over devices together
(ProTrain §4, with the actions of single tensors).
"""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from jaxmem._core.assignment import FLOAT, INT8
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._core.progress import LOG
from jaxmem._cost.profile.doubt import MIN_GAIN_DEFAULT
from jaxmem._cost.profile.options import Allowed
from jaxmem._model.states.places import DIVIDED, DIVIDED_WORDS
from jaxmem._optim.released.loss import bound
from jaxmem._optim.released.step import released_of
from jaxmem._planner.advice import infeasible_placement
from jaxmem._planner.outcome.placed import placed_plan
from jaxmem._planner.placement.front import front, front_of_others
from jaxmem._planner.placement.layer import (
    GATHERED_BESIDE,
    LAYERS,
    LESS_BESIDE,
    NOTHING,
    ONE_DEVICE,
    RESIDENT,
    Link,
    Sharding,
)
from jaxmem._planner.placement.program import PlacementProblem, solve_placement
from jaxmem._planner.placement.search import PlacedTrial, PlacementSearch, with_working
from jaxmem._planner.placement.steps import PlacedSteps
from jaxmem._planner.search.trial import Limits
from jaxmem._planner.traced_step import read_step
from jaxmem._result.plan.plan import Plan
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.devices.target import Target
from jaxmem._trace.arguments import are_on_several_devices
from jaxmem.errors import BudgetError, OptimizerError, StepError, TargetError

ACTIONS, STATES, SHARDING, MICROBATCHES = DECIDED = (
    "actions", "states", "sharding", "microbatches",
)  # fmt: skip
# A step to plan: `build`, the step's arguments, its backend, the limits, and the actions and codecs
# to choose from.
Given = tuple[Any, tuple, Backend, Limits, Allowed]


def check_decide(
    decide: Collection[str], target: Target, measure: float | None, args: tuple
) -> frozenset[str]:
    """Returns the names of the plan's decisions, a subset of `DECIDED`. Raises StepError for an
    invalid `decide`, and TargetError for a target, or for arguments on several devices at hand, for
    which `decide` is not possible.
    """
    is_collection = isinstance(decide, Collection) and not isinstance(decide, str)
    names = frozenset(map(str, decide)) if is_collection else frozenset({str(decide)})
    states, sharding = STATES in names, SHARDING in names
    if not names <= set(DECIDED) or ACTIONS not in names or (sharding and not states):
        raise StepError(
            f"plan: `decide` is {decide!r}; expected ('actions',), or ('actions', 'states') for a"
            " released step whose states may lie in host memory, or ('actions', 'states',"
            " 'sharding') for one that is divided over several devices; and 'microbatches' in any"
        )
    if not states:
        return names
    several = not target.local or are_on_several_devices(args)
    if target.devices > 1 and several and not sharding:
        raise TargetError(
            f"plan: `decide` has 'states', and `target` is {str(target)!r}; expected one device, or"
            " 'sharding' in `decide` too: it places states that are divided over several devices"
        )
    if target.devices == 1 and sharding:
        raise TargetError(
            f"plan: `decide` has 'sharding', and `target` is {str(target)!r}; expected several"
            " devices, as in 'h200:8', or `decide` without it"
        )
    if measure is not None:
        raise StepError(
            f"plan: `measure` is {measure}, and `decide` has 'states', whose steps take arguments"
            " in different memories, so that they are not compared by runs; expected measure=None"
        )
    return names


def check_lossy(lossy_states: bool, decide: frozenset[str], batch: str | None) -> None:
    """Raises StepError if `lossy_states` is no boolean, or True for a plan that places no states or
    chooses a size.
    """
    if not isinstance(lossy_states, bool) or (lossy_states and STATES not in decide):
        raise StepError(
            f"plan: `lossy_states` is {lossy_states!r}, and `decide` has"
            f" {', '.join(map(repr, sorted(decide)))}; expected False, or True beside"
            " decide=('actions', 'states')"
        )
    if lossy_states and batch is not None:
        raise StepError(
            f"plan: `lossy_states` is True, and `batch` is {batch!r}, which is chosen for float"
            " moments; expected batch=None, or an optimizer whose moments are in 8 bits already"
        )


def plan_places(
    given: Given, notes: tuple[str, ...], decide: Collection[str], lossy_states: bool = False
) -> Plan:
    """Makes the plan for one number of microbatches.

    notes: sentences for the user that precede the plan's other notes.
    decide: the names of the plan's decisions, as `check_decide` returns them.
    lossy_states: whether the plan may store the optimizer's moments in 8 bits.

    Moments in 8 bits are chosen if no plan with float moments fits, or if they gain at least 2 % of
    the step time plus the uncertainty. They are not chosen for their time if XLA has no estimates
    for the target: the seconds of coding are then unknown.
    """
    every = placement_searches(given, decide)

    def plan_of(search: PlacementSearch, best: PlacedTrial) -> Plan:
        return placed_plan(search, best, notes, [one for one in every if one is not search])

    if not lossy_states:
        return plan_of(*_fastest(every))
    every[0].steps.check_quantized()
    try:
        search, best = _fastest(every)
    except BudgetError:
        every += (coded := placement_searches(given, decide, INT8))
        return _in_8_bits(plan_of(*_fastest(coded)), "no plan with float moments fits")
    exact = plan_of(search, best)
    if exact.keeps_everything or best.step.compiled.xla_seconds is None:
        return exact
    every += (coded := placement_searches(given, decide, INT8))
    exact = plan_of(search, best)
    gain = lambda seconds, other: (
        other - seconds - search.profile.uncertainty * abs(other - seconds)
    )
    least = MIN_GAIN_DEFAULT * exact.predicted_seconds
    solved = [solve_placement(one.within(one.limits.usable_bytes)) for one in coded]
    expected = min((one.risk_adjusted_seconds for one in solved if one), default=math.inf)
    if gain(expected, best.solution.risk_adjusted_seconds) < least:
        return exact
    try:
        lossy = plan_of(*_fastest(coded))
    except (BudgetError, StepError):
        return exact
    if gain(lossy.predicted_seconds, exact.predicted_seconds) < least:
        return exact
    more = 1e3 * (exact.predicted_seconds - lossy.predicted_seconds)
    why = f"the fastest plan with float moments is predicted to take {more:.2f} ms more a step"
    return _in_8_bits(lossy, why)


def _in_8_bits(plan: Plan, why: str) -> Plan:
    """The plan with the reason for its moments in 8 bits."""
    return dataclasses.replace(plan, lossy=f"the optimizer's moments are in 8 bits: {why}")


def placement_searches(
    given: Given, decide: Collection[str], moments: str = FLOAT
) -> list[PlacementSearch]:
    """The search for the step on one device. If the plan decides the division over devices, a
    search under each division that the step's optimizer supports. Raises OptimizerError if the
    optimizer supports no division. The arguments are the arguments of `plan_places`.

    moments: how the step stores the optimizer's moments.
    """
    if SHARDING not in decide:
        return [read_places(given, moments=moments)]
    build, args, backend, *_ = given
    target = backend.target
    released, _ = released_of(bound(build(None), args))
    accumulates = bool(getattr(released, "accumulates", True))
    # If XLA has estimates for the target, its schedule overlaps more of an all-gather.
    chip = target.chip
    beside = GATHERED_BESIDE if chip is not None and chip.has_xla_estimates else LESS_BESIDE
    searches, refused = [], None
    # Optimizers other than AdamA always gather by layer.
    for how in DIVIDED if accumulates else (NOTHING, LAYERS):
        sharding = Sharding(how, target.devices, target.peers, accumulates, beside)
        try:
            searches.append(read_places(given, sharding, moments))
        except OptimizerError as error:
            refused = refused or error
    if not searches:
        assert refused is not None
        raise refused
    return searches


def _fastest(every: list[PlacementSearch]) -> tuple[PlacementSearch, PlacedTrial]:
    """The search of the sharding under which a step is fastest, and its best trial. A sharding that
    the program expects to be slower than the fastest compiled trial is not compiled. Raises
    BudgetError if nothing fits.
    """
    if len(every) == 1:
        (search,) = every
        if (best := search.run()) is None:
            raise infeasible_placement(search)
        return search, best
    fitting: list[tuple[PlacementSearch, PlacedTrial]] = []
    pairs = ((s, solve_placement(s.within(s.limits.usable_bytes))) for s in every)
    expected = [(search, one.risk_adjusted_seconds) for search, one in pairs if one is not None]
    refused: StepError | None = None
    for search, seconds in sorted(expected, key=lambda pair: pair[1]):
        if fitting and min(map(_seconds, fitting)) <= seconds:
            break
        try:
            best = search.run()
        except StepError as error:
            # Because of a defect of XLA, one division may not compile although others do.
            LOG.warning("a division of the step over devices is left out: %s", str(error)[:400])
            refused = error
            continue
        if best is not None:
            fitting.append((search, best))
    if not fitting:
        least = lambda search: one.device_bytes if (one := search.least()) else float("inf")
        nearest = min(every, key=least)
        # The step may fit although the program has no solution. Its solution of least bytes was not
        # compiled yet.
        best = None if nearest.trials else nearest.run()
        if best is None:
            if refused is not None and not nearest.trials:
                raise refused
            raise infeasible_placement(nearest)
        fitting.append((nearest, best))
    return min(fitting, key=_seconds)


def _seconds(pair: tuple[PlacementSearch, PlacedTrial]) -> float:
    return pair[1].solution.risk_adjusted_seconds


def read_places(
    given: Given, sharding: Sharding = ONE_DEVICE, moments: str = FLOAT
) -> PlacementSearch:
    """Traces a step, profiles it with resident states, and estimates it with streamed states."""
    build, args, backend, limits, allowed = given
    several = sharding.devices > 1
    steps = PlacedSteps(build, args, backend, sharding.divided if several else None, moments)
    states = steps.states()
    sharding = dataclasses.replace(sharding, devices=steps.devices)
    moves = sharding.by_layer or not several  # otherwise all states remain on their devices
    places = steps.possible if moves else (RESIDENT,)
    step = read_step(steps.at(steps.resident), None, allowed)
    profile, block = _with_stack(step.profile, steps)
    target = backend.target
    over = f", divided over devices: {DIVIDED_WORDS[sharding.divided]}" if several else ""
    in_host = ", its layers' states in host memory" if len(places) > 1 else ""
    LOG.info("estimating the step%s%s", in_host, over)
    problem = PlacementProblem(
        states,
        front(profile, block),
        Link(*backend.link, beside=target.traits.host_is_apart),
        block.runs // block.layers,
        front_of_others(profile, block),
        places=places,
        sharding=sharding,
        outer_moves=moves,
    )
    problem = dataclasses.replace(problem, policies=with_working(problem, steps, profile))
    return PlacementSearch(
        steps, profile, block, problem, limits, step.notes, profile_seconds=step.seconds
    )


def _with_stack(profile: Profile, steps: PlacedSteps) -> tuple[Profile, BlockClass]:
    """The profile with one block for the layers whose states are placed, and this block. Raises
    StepError unless the layers are all layers of one block.
    """
    stacks = [b for b in profile.blocks if b.name == steps.label]
    count = sum(b.layers for b in stacks)
    tags = {tuple((t.name, b.values[t.value]) for t in b.tags) for b in stacks}
    if len(tags) != 1 or count != steps.layers:
        known = ", ".join(f"{b.name!r} of {b.layers}" for b in profile.blocks)
        raise StepError(
            f"plan: the step has {steps.layers} layers of states, of the block {steps.label!r}, and"
            f" its blocks are {known}; expected one block of this label, with as many layers: give"
            " `plan` to released_step, and other blocks other labels; of layers that are unlike"
            " each other, plan the actions alone"
        )
    if len(stacks) == 1:
        return profile, stacks[0]
    # The first layer of a Python loop may read an argument of the step, which is always in memory.
    # It is counted like the other layers.
    runs = sum(b.runs for b in stacks)
    most = max(stacks, key=lambda b: b.layers)
    block = dataclasses.replace(most, layers=count, runs=runs, divisible=count)
    others = (b for b in profile.blocks if b not in stacks)
    return dataclasses.replace(profile, blocks=(block, *others)), block

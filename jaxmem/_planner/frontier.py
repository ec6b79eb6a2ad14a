"""frontier(): the step time, the throughput and the bytes of a step over sizes and budgets.

The estimate of a cell is the first guess of a search: the solution of the mixed-integer program for
the bytes that liveness estimates leave. All cells of a size share one profile and its liveness
estimates, and no cell is compiled for its estimate. For each budget, the size of the highest
estimated throughput is planned, and so compiled.

A sum of the times of pieces leaves out operations between the pieces. The estimated seconds of all
cells are therefore multiplied by one factor, the geometric mean over the compiled cells of compiled
seconds divided by estimated seconds. A factor for each size would be closer, but would change which
size is the best of a budget after the best size was compiled.

The first choice was `jaxmem.plan` for each cell, with up to six compiles a cell. Another
alternative is `Plan.pareto` of one plan for each size. It predicts bytes by a model that is fitted
to compiles near one budget, and cannot say whether a smaller budget is feasible.
"""

import dataclasses
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

import jax

from jaxmem._core.actions import Action
from jaxmem._core.assignment import Assignment
from jaxmem._core.bytes import parse_budget, show_bytes
from jaxmem._core.progress import LOG
from jaxmem._cost.profile.options import Allowed
from jaxmem._planner.advice import infeasible_placement
from jaxmem._planner.microbatches import checked, numbers_for
from jaxmem._planner.placement.plan import (
    MICROBATCHES,
    SHARDING,
    STATES,
    check_decide,
    placement_searches,
)
from jaxmem._planner.placement.search import PlacementSearch
from jaxmem._planner.plan import allowed_choices, database_for, plan
from jaxmem._planner.search.baseline import first_guess
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.search.step_time import LEAST_GAIN, outside_blocks, sum_of_pieces
from jaxmem._planner.search.trial import Limits
from jaxmem._planner.sizes import check_sized, checked_sizes
from jaxmem._planner.solve.cost import everything
from jaxmem._planner.traced_step import TracedStep, read_step
from jaxmem._result.frontier import Cell, Frontier
from jaxmem._result.plan.plan import Plan
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.devices.target import Target
from jaxmem._trace.arguments import sized
from jaxmem._trace.jaxpr import matmul_flops
from jaxmem._trace.step import with_microbatches
from jaxmem.errors import BudgetError, StepError

# The seconds by which plans are ranked, and a cell whose budget is not set yet.
Ranked = tuple[float, Cell]
# Estimated bytes divided by usable bytes up to which the smallest cell of a budget is compiled.
# Liveness estimates were up to 1.41 times the compiled bytes (docs/results.md).
ERROR = 1.5


def frontier(
    build,
    *args,
    batches: Sequence[int],
    budgets: Sequence[int | float | str],
    tokens: int | None = None,
    host_budget=None,
    target: str | Target = "local",
    actions: Sequence[Action | str] | str | None = None,
    codecs=None,
    outliers: Mapping[str, Mapping[str, int]] | None = None,
    microbatches: Sequence[int] | None = None,
    decide: Collection[str] = ("actions",),
    fresh: bool = False,
) -> Frontier:
    """Estimates step time, throughput and bytes over sizes of the batch and budgets, and compiles
    the size of the highest throughput for each budget.

    build, host_budget, target, actions, codecs, outliers, microbatches, decide, fresh: as for
      `jaxmem.plan`.
    args: the step's arguments. Pass a plain function of the size in place of each argument that
      depends on the size, such as `lambda n: jax.ShapeDtypeStruct((n, 1024), jnp.int32)`. Arrays
      that the function returns are not allocated.
    batches: the sizes, such as (8, 16, 32).
    budgets: the budgets, such as ("20GiB", "40GiB"), each in the forms of `jaxmem.plan`.
    tokens: the number of tokens of one example, such as the length of a sequence. The frontier then
      shows tokens a second. None means that it shows examples a second alone.

    The step is traced, and its pieces are timed, once for each size, and once for each number of
    microbatches. The bytes are liveness estimates, which are neither an upper nor a lower bound.
    For a named TPU, the bytes come from libtpu's buffer assignment. The seconds are the seconds of
    the step with everything kept, as the sum of its pieces, plus the difference of the plan, times
    a factor that is the mean of compiled over estimated seconds. Estimates leave out plans that
    divide layers into groups, and the step's own checkpoints. If a compile shows that a size does
    not fit although estimates expected it to fit, the next best size is compiled. If estimates
    expect no size to fit a budget, the smallest size is compiled, unless its estimate exceeds
    1.5 times the budget. A plan of a larger budget is used for a smaller one that it fits.

    Raises BudgetError, with the least bytes, if no size fits any budget. Raises StepError for
    invalid sizes and arguments, and in a run of several processes: call `frontier` in a process of
    its own. Raises other errors as `jaxmem.plan` does.
    """
    target = Target.parse(target)
    decided = check_decide(decide, target, None, args)
    batches = checked_sizes(batches, "frontier: `batches`")
    check_sized(args, f"frontier: `batches` is {batches}")
    if tokens is not None:
        (tokens,) = checked_sizes([tokens], "frontier: `tokens`")
    each = _checked_budgets(budgets, target)
    host_room = parse_budget(host_budget, target.host_bytes, "host_budget")
    allowed, _ = allowed_choices(actions, codecs, outliers, target)
    if jax.process_count() > 1:
        raise StepError(
            f"frontier: called in one of {jax.process_count()} processes, which may estimate"
            " differently; expected a single process: call it without jax.distributed.initialize"
        )
    cells: list[Cell] = []
    with backend_for(target, database_for(fresh)) as backend:
        limits = [Limits.on(backend, budget, host_room) for budget in each]
        for batch in batches:
            LOG.info("estimating plans for size %d", batch)
            of_batch = sized(args, batch)
            numbers = [None] if microbatches is None else checked(microbatches)
            if MICROBATCHES in decided and microbatches is None:
                numbers = numbers_for(of_batch, target.devices if SHARDING in decided else 1)
            found: list[Ranked] = []
            for number in numbers:
                cell = Cell(batch, budget_bytes=1, bytes=0, microbatches=number)
                step = with_microbatches(build, number)
                found += _estimated(step, of_batch, backend, limits, allowed, decided, cell)
            cells += [_best_within(found, one) for one in limits]

    def plan_for(cell: Cell) -> Plan:
        made = plan(
            build,
            *sized(args, cell.batch),
            budget=cell.budget_bytes,
            host_budget=host_budget,
            target=target,
            actions=actions,
            codecs=codecs,
            outliers=outliers,
            microbatches=None if cell.microbatches is None else [cell.microbatches],
            decide=decide,
            fresh=fresh,
        )
        return dataclasses.replace(made, batch=cell.batch)

    done = _compiled(cells, limits, plan_for)
    source = next((cell.plan.time_source for cell in done if cell.plan is not None), None)
    if source is None:
        smallest = min(done, key=lambda cell: cell.bytes)
        raise BudgetError(
            f"frontier: no size fits any of `budgets`: the least is {show_bytes(smallest.bytes)}"
            f" ({smallest.bytes} bytes), of size {smallest.batch}, and the largest budget is"
            f" {show_bytes(each[-1])}; expected a larger budget, or a smaller size in `batches`",
            least_bytes=smallest.bytes,
            least_budget=limits[-1].budget_for(smallest.bytes),
        )
    return Frontier(tuple(_scaled(done)), str(target), target.usable_bytes, source, tokens)


def _checked_budgets(budgets: Sequence[int | float | str], target: Target) -> list[int]:
    """The budgets in bytes, in ascending order, each once. Raises StepError unless `budgets` is a
    sequence of at least one budget.
    """
    if isinstance(budgets, str) or not isinstance(budgets, Sequence) or not budgets:
        raise StepError(
            f"frontier: `budgets` is {budgets!r}; expected several budgets, such as"
            " ('20GiB', '40GiB')"
        )
    return sorted({parse_budget(one, target.usable_bytes, "budgets") for one in budgets})


def _estimated(
    build,
    args: tuple,
    backend: Backend,
    limits: Sequence[Limits],
    allowed: Allowed,
    decide: Collection[str],
    cell: Cell,
) -> list[Ranked]:
    """Plans for one size and one number of microbatches: the plans that estimates expect to be the
    fastest under each of the limits, or else to be the smallest.

    cell: a cell with the size and the number of microbatches.

    Raises BudgetError if no plan needs as little host memory as the limits.
    """
    if STATES not in decide:
        step = read_step(StepCompiler(build, args, backend), None, allowed)
        return _of_actions(step, limits, allowed.codecs_by_default, cell)
    searches = placement_searches((build, args, backend, limits[0], allowed), decide)
    found = [ranked for search in searches for ranked in _of_places(search, limits, cell)]
    if not found:
        raise infeasible_placement(searches[-1])
    return found


def _of_actions(
    step: TracedStep, limits: Sequence[Limits], codecs_by_default: bool, cell: Cell
) -> list[Ranked]:
    """The step with everything kept, and the first guess of a search under each of the limits."""
    profile, kept = step.profile, everything(step.profile)
    search = step.search(limits[0], codecs_by_default)
    estimates, static = search.estimates, step.arguments
    # The trace of the step with everything kept is made once.
    everything_bytes = static + estimates.estimate_step(profile.everything_kept)[0]
    traced = step.compiler.trace(step.compiler.plan_of(profile.everything_kept))
    base = sum_of_pieces(profile, _products(traced, step.shards), static, step.target)
    # As in a search, a step that fits is changed only for a gain of at least `LEAST_GAIN`, and is
    # not changed by times of a roofline.
    rank = 0.0 if profile.time_source == "roofline" else (1 - LEAST_GAIN) * base
    found = [(rank, dataclasses.replace(cell, bytes=everything_bytes, seconds=base))]
    guesses = [first_guess(dataclasses.replace(search, limits=one), [], static) for one in limits]
    working = estimates.model([])
    for guess in guesses:
        # Times that were measured may add up to less for the whole step than for its blocks.
        seconds = max(guess.seconds, base + guess.seconds - kept.seconds)
        size = max(0, int(guess.saved_bytes + working.predict(guess.actions)))
        made = dataclasses.replace(
            cell, bytes=static + size, host_bytes=guess.host_bytes, seconds=seconds
        )
        found.append((seconds + guess.cost.doubt_seconds, made))
    return found


def _of_places(search: PlacementSearch, limits: Sequence[Limits], cell: Cell) -> list[Ranked]:
    """The solution of a search over placements, before its first compile, under each of the limits.
    Limits whose host memory is too small for every solution are left out.
    """
    steps, states = search.steps, search.problem.states.resident
    traced = steps.at(steps.resident).trace(Assignment.everything())
    products = _products(traced, steps.devices)
    outside = outside_blocks(search.profile, products, states, steps.backend.target)
    found: list[Ranked] = []
    for one in limits:
        search.limits = one
        if (solution := search.agreed()) is None:
            continue
        made = dataclasses.replace(
            cell,
            bytes=search.expected(solution),
            host_bytes=solution.host_bytes,
            seconds=solution.seconds + outside,
        )
        found.append((solution.risk_adjusted_seconds + outside, made))
    return found


def _products(traced: jax.stages.Traced, devices: int) -> float:
    """FLOPs of the matrix products of a traced step on one of several devices."""
    return sum(matmul_flops(eqn)[0] for eqn in traced.jaxpr.jaxpr.eqns) / devices


def _best_within(found: Sequence[Ranked], limits: Limits) -> Cell:
    """The cell of the best plan within the limits, or else of the smallest plan."""
    fitting = [ranked for ranked in found if _fits(ranked[1], limits)]
    best = min(fitting, key=lambda ranked: (ranked[0], ranked[1].bytes), default=None)
    cell = best[1] if best else min((cell for _, cell in found), key=lambda cell: cell.bytes)
    return dataclasses.replace(cell, budget_bytes=limits.budget)


def _fits(cell: Cell, limits: Limits) -> bool:
    """Whether a cell is within the limits: by its plan, or else by its estimate. A cell without
    seconds was refused when it was compiled.
    """
    size, host = cell.bytes, cell.host_bytes
    if cell.plan is not None:
        size, host = cell.plan.compiled_bytes, cell.plan.host_bytes
    elif cell.seconds is None:
        return False
    return size <= limits.usable_bytes and host <= limits.host_bytes


def _compiled(
    cells: Sequence[Cell], limits: Sequence[Limits], plan_for: Callable[[Cell], Plan]
) -> list[Cell]:
    """The cells, with a plan for the best cell of each budget. If a cell does not fit by a compile,
    the next best cell of the budget is planned. If no cell fits by its estimate, the smallest cell
    is planned, since estimates may be too high. A budget whose best cell equals a compiled cell of
    a smaller budget is not planned. Cells that do not fit have no seconds.

    limits: the limits of each budget, by rising budget.
    plan_for: plans a cell, or raises BudgetError.
    """
    done = list(cells)
    numbers = lambda cell: (cell.batch, cell.microbatches, cell.bytes, cell.seconds)
    for one in limits:
        column = [i for i, c in enumerate(done) if c.budget_bytes == one.budget]
        fitting = [i for i in column if _fits(done[i], one)]
        smallest = min(column, key=lambda i: done[i].bytes)
        if not fitting and done[smallest].bytes <= ERROR * one.usable_bytes:
            fitting = [smallest]
        for i in sorted(fitting, key=lambda i: -done[i].throughput):
            cell = done[i]
            if numbers(cell) in [numbers(c) for c in done if c.plan is not None]:
                break
            LOG.info("planning for size %d and %s", cell.batch, show_bytes(one.budget))
            try:
                done[i] = dataclasses.replace(cell, plan=plan_for(cell))
                break
            except BudgetError as error:
                # An error without bytes does not mean that the size is too large.
                if error.least_bytes is None:
                    raise
                done[i] = dataclasses.replace(cell, bytes=error.least_bytes, seconds=None)
    by_budget = {one.budget: one for one in limits}
    return [_with_fitting_plan(cell, by_budget[cell.budget_bytes], done) for cell in done]


def _with_fitting_plan(cell: Cell, limits: Limits, compiled: Sequence[Cell]) -> Cell:
    """The cell, or a faster compiled cell of its size that fits its budget. A cell that does not
    fit, and for which there is no other, has no seconds.
    """
    if cell.plan is not None:
        return _within(cell, cell.plan, limits)
    fitting = [cell] if _fits(cell, limits) else []
    fitting += [
        _within(other, other.plan, limits)
        for other in compiled
        if other.plan is not None and other.batch == cell.batch and _fits(other, limits)
    ]
    without = dataclasses.replace(cell, seconds=None)
    return max(fitting, key=lambda one: one.throughput, default=without)


def _within(cell: Cell, plan: Plan, limits: Limits) -> Cell:
    """A compiled cell for a budget that its plan fits. Its bytes are compiled bytes if its estimate
    exceeds the budget.
    """
    size = cell.bytes if cell.bytes <= limits.usable_bytes else plan.compiled_bytes
    plan = dataclasses.replace(plan, budget_bytes=limits.budget)
    return dataclasses.replace(cell, budget_bytes=limits.budget, bytes=size, plan=plan)


def _scaled(cells: Sequence[Cell]) -> list[Cell]:
    """The cells with their estimated seconds multiplied by one factor: the geometric mean over the
    compiled cells of compiled seconds divided by estimated seconds.
    """
    ratios = [
        cell.plan.predicted_seconds / cell.seconds
        for cell in cells
        if cell.plan is not None and cell.plan.predicted_seconds and cell.seconds
    ]
    factor = statistics.geometric_mean(ratios) if ratios else 1.0
    scale = lambda seconds: None if seconds is None else factor * seconds
    return [dataclasses.replace(cell, seconds=scale(cell.seconds)) for cell in cells]

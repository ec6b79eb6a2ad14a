"""The errors for budgets that no plan meets, and advice to the user about options that were not
requested, and that would have met the budget or saved time.

Values that `checkpoint_name` names: their authors never agreed to a loss, so `jaxmem.plan` leaves
out codecs for them unless `actions` requests codecs. For the advice, the same problem is solved
with these codecs. The advice says that codecs would have met the budget only if such a plan
compiled within the budget.

Schedules: if XLA's schedule of unrolled layers on a GPU holds far more than the liveness estimate,
the advice names both sizes. The rule compares with the estimate, and not with a compiled scan: a
scan of the same layers would be another program of the user's.

Arguments: if the arguments alone exceed the budget, the advice names changes that would make them
smaller, and the bytes that each change saves.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmem._core.bytes import show_bytes
from jaxmem._core.profile import Profile
from jaxmem._planner.placement.search import PlacementSearch
from jaxmem._planner.search.candidates import solve_fastest
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.step_time import LEAST_GAIN
from jaxmem._planner.search.trial import Limits, Trial
from jaxmem._planner.solve.problem import keys_of
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem._result.plan.rows import Bytes
from jaxmem._target.devices.target import Target
from jaxmem._trace.arguments import divisors, on_host
from jaxmem._trace.jaxpr import nbytes
from jaxmem.errors import BudgetError, StepError

ASK = 'it was not asked for: give actions="all"'


def would_fit(search: Search, wider: Callable[[], Profile]) -> str:
    """The end of a sentence about a budget that was not met: the values whose compression would
    have met the budget. Empty if compression would not have met it.

    search: the search that found no plan; it compiles the plan with codecs.
    wider: makes the profile with prices for codecs of all values.
    """
    with_codecs = _solved(search, wider)
    if with_codecs is None:
        return ""
    solution, names = with_codecs
    (step,) = search.try_compile_buffers(solution.actions, least=search.least_bytes)
    if isinstance(step, StepError) or not search.limits.allow(step):
        return ""
    return f"; compressing {names} would have met it, with {show_bytes(step.total)}: {ASK}"


def would_save(search: Search, best: Trial, wider: Callable[[], Profile]) -> tuple[str, ...]:
    """A sentence about the time that compression of these values is predicted to save compared with
    `best`, if it saves at least `LEAST_GAIN` of the step.
    """
    with_codecs = _solved(search, wider)
    if with_codecs is None:
        return ()
    solution, names = with_codecs
    spared = best.cost.seconds - solution.seconds
    if spared <= LEAST_GAIN * search.profile.step_seconds:
        return ()
    return (f"compressing {names} is predicted to spare {spared * 1e3:.2f} ms a step; {ASK}",)


def _solved(search: Search, wider: Callable[[], Profile]) -> tuple[ActionSolution, str] | None:
    """The fastest assignment with codecs for all values, and, as a phrase, the values that it
    compresses and that the search could not compress. None if no assignment fits, or if there are
    no such values.
    """
    lossless = _lossless(search.profile)
    if not lossless:
        return None
    problem = dataclasses.replace(search.problem(search.model()), profile=wider())
    solution = solve_fastest(problem)
    if solution is None:
        return None
    encoded = ((block, tag) for block, tag, c in keys_of(solution.actions) if c.action.encodes)
    names = {tag for block, tag in encoded if (block, tag) in lossless}
    if not names:
        return None
    return solution, f"{', '.join(map(repr, sorted(names)))}, which checkpoint_name names,"


def _lossless(profile: Profile) -> set[tuple[str, str]]:
    """Labels and names of the tags that no codec of the profile compresses."""
    return {
        (block.name, tag.name)
        for block in profile.blocks
        for tag in block.tags
        if not any(o.choice.action.encodes for o in tag.options)
    }


# A step whose temporaries exceed their liveness estimate by this factor. For eight unrolled layers
# with a checkpoint each, divided over eight H200, the factor is 4.9; under a scan, it is 1.2.
HELD = 2.0


def held_by_schedule(search: Search, trial: Trial) -> tuple[str, ...]:
    """A sentence about a compiled step whose layers a Python loop repeats on a GPU, and whose
    temporaries exceed their liveness estimate by a factor of `HELD`: XLA orders operations of such
    layers freely, and may hold tensors of many layers at the same time.
    """
    if not search.profile.unrolled or not search.compiler.backend.target.traits.as_gpu:
        return ()
    # Remove with a fix: openxla/xla #45753.
    held, expected = trial.step.compiled.temp_bytes, search.estimates.estimate(trial.actions)
    if expected is None or held < HELD * expected:
        return ()
    labels = ", ".join(map(repr, search.profile.unrolled))
    return (
        f"the layers of block {labels} follow each other without a loop, and XLA's schedule holds"
        f" {show_bytes(held)} of temporaries, where their order in the program needs"
        f" {show_bytes(expected)} (openxla/xla #45753): loop over the layers with jax.lax.scan, or"
        " try XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=false",
    )


# The number of devices in the example of divided states, if the target is a single device.
DEVICES = 8
# The names of moments in optimizers: attributes or keys of their states.
MOMENTS = frozenset(
    {"m", "v", "mu", "nu", "trace", "momentum", "velocity", "exp_avg", "exp_avg_sq"}
)


def _remedies(traced: jax.stages.Traced, args: tuple, devices: int) -> str:
    """The end of a sentence that names ways to make the arguments smaller, each with the bytes that
    it saves on one device. "" if no argument is donated, since model states are then unknown.

    traced, args: the traced step, and its arguments.
    devices: the number of devices of the target.
    """
    states = moments = 0
    infos = jax.tree.leaves_with_path(traced.args_info)
    for (path, info), aval, parts in zip(infos, traced.jaxpr.in_avals, divisors(traced, args)):
        if not info.donated or on_host(aval) or not jnp.issubdtype(aval.dtype, jnp.floating):
            continue
        size = nbytes(aval) // (parts or 1)
        states += size
        names = {str(getattr(key, "name", getattr(key, "key", ""))) for key in path}
        if names & MOMENTS and aval.dtype.itemsize >= 4:
            moments += size
    if not states:
        return ""
    count = devices if devices > 1 else DEVICES
    ways = [
        "a jaxmem.released_step planned with decide=('actions', 'states') keeps states of layers in"
        f" host memory: up to {show_bytes(states)} less",
        f"its data_parallel divides states over {count} devices: up to"
        f" {show_bytes(states - states // count)} less",
    ]
    if moments:
        ways.append(f"moments in bfloat16: {show_bytes(moments // 2)} less")
    ways.append("more microbatches: 0 B less, since they divide saved tensors and no arguments")
    return "; ".join(ways)


# The parts of a step's bytes, in the order of the fields of `Bytes`, and how to make them smaller.
SAVED = "tensors saved for the backward"
ADVICE = {
    "arguments and model states": "use a smaller model, lower-precision states, or more devices",
    SAVED: "allow more actions, or tag more tensors",
    "working memory of the head and one block": "chunk the loss, or use a smaller batch, or more"
    " microbatches",
}


def arguments_exceed(
    arguments: int, limits: Limits, target: Target, traced: jax.stages.Traced, args: tuple
) -> BudgetError:
    """Returns the error for a budget that the step's arguments alone exceed. The error is raised
    before the first compile.

    arguments: bytes of the arguments on one device.
    traced, args: the traced step, and its arguments.
    """
    each, advice = _each(target), _remedies(traced, args, target.devices)
    return BudgetError(
        f"plan: `budget` is {show_bytes(limits.budget)}, and the step's arguments alone take"
        f" {show_bytes(arguments)} ({arguments} bytes){each} for target {str(target)!r}. Every plan"
        " takes more, so none was compiled: give a larger budget, or"
        f" {ADVICE['arguments and model states']}{_margin(limits, arguments)}"
        + (f". {advice[0].upper()}{advice[1:]}" if advice else ""),
        least_bytes=arguments,
        least_budget=limits.budget_for(arguments),
    )


def infeasible(search: Search, unnamed: str = "", hint: str = "") -> BudgetError:
    """Returns the error that names the least compiled bytes, and the largest part of them.

    unnamed: the largest tensors that no tag names, as a text; may be empty.
    hint: text that is added to the end of the sentence.
    """
    least, target = search.smallest_trial, search.compiler.backend.target
    budget = search.limits.budget
    sizes = Bytes.of(least.total, search.static, least.cost.saved_bytes)
    parts = dict(zip(ADVICE, dataclasses.astuple(sizes)))
    holder = max(parts, key=lambda k: parts[k])
    message = (
        f"plan: `budget` is {show_bytes(budget)} ({budget} bytes), and the least that compiled is"
        f" {show_bytes(least.total)} ({least.total} bytes){_each(target)} for target"
        f" {str(target)!r}, of {len(search.trials) + len(search.in_spans)} assignments: "
        + ", ".join(f"{show_bytes(v)} {k}" for k, v in parts.items())
        + f"; the largest part is {holder}: {ADVICE[holder]}"
        + _margin(search.limits, least.total)
    )
    if unnamed and holder == SAVED:
        message += f"; the largest tensors that no tag names are {unnamed}"
    message += "".join(f"; {sentence}" for sentence in held_by_schedule(search, least))
    if least.host_bytes:
        message += f"; host memory needed: {show_bytes(least.host_bytes)}"
    return BudgetError(message + hint, least.total, search.limits.budget_for(least.total))


def infeasible_placement(search: PlacementSearch) -> BudgetError:
    """The error that names the least bytes, on the device and in host memory."""
    least, states, limits = search.least(), search.problem.states, search.limits
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
    over = [t.total for t in search.trials if t.total > limits.usable_bytes]
    bytes_ = min([search.expected(least), *over])
    return BudgetError(
        f"plan: `budget` is {given}, and `host_budget` {host} for target {str(target)!r}: the least"
        f" that is expected to compile is {show_bytes(bytes_)} ({bytes_} bytes) on the device, with"
        f" {show_bytes(least.host_bytes)} in host memory, {least.places}; expected a larger budget:"
        f" smaller microbatches and a chunked loss need less{_margin(limits, bytes_)}",
        least_bytes=bytes_,
        least_budget=limits.budget_for(bytes_),
    )


def _each(target: Target) -> str:
    """The phrase that follows bytes in an error for a target of several devices, since the bytes
    are bytes of one device. Empty for a single device.
    """
    several = not target.local and target.devices > 1
    return f" on each of {target.devices} devices" if several else ""


def _margin(limits: Limits, least: int) -> str:
    """The end of an error's sentence, about the share of the budget that a plan may not use, and
    the smallest budget with room for the `least` bytes; empty if a plan may use the whole budget.
    """
    if not limits.margin:
        return ""
    needed = limits.budget_for(least)
    return (
        f"; {limits.margin:.0%} of the budget is left for what the device takes beside a step's"
        f" buffers, so that these bytes need a budget of {show_bytes(needed)} ({needed} bytes)"
    )

"""plan(): checks its arguments, profiles the step, runs a search, and returns the search's plan."""

import dataclasses
import functools
import math
import time
from collections.abc import Collection, Mapping, Sequence

from jaxmem._core.actions import ALL, KEEP, LOSSLESS, Action
from jaxmem._core.bytes import parse_budget, show_bytes
from jaxmem._core.database import Database
from jaxmem._core.groups import is_auto
from jaxmem._core.profile import Profile
from jaxmem._core.warn import silently, warn
from jaxmem._cost.blocks.unnamed import listed, unnamed
from jaxmem._cost.profile.options import Allowed, checked_codecs, checked_outliers
from jaxmem._cost.profile.times import RETRY_SECONDS
from jaxmem._model.tags.storage import TWICE
from jaxmem._planner.advice import infeasible, would_fit, would_save
from jaxmem._planner.microbatches import checked, fastest_plan, numbers_for
from jaxmem._planner.multi_process import by_the_first
from jaxmem._planner.outcome.searched import searched_plan
from jaxmem._planner.placement.plan import (
    MICROBATCHES,
    SHARDING,
    STATES,
    check_decide,
    check_lossy,
    plan_places,
)
from jaxmem._planner.search.candidates import price_of
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.search.measure import check_measure, compare_by_runs
from jaxmem._planner.search.search import find_plan
from jaxmem._planner.search.trial import Limits
from jaxmem._planner.sizes import Boundary, StepSizes, check_batch, of_size, possible
from jaxmem._planner.solve import waste
from jaxmem._planner.traced_step import TracedStep, read_step
from jaxmem._result.plan.plan import Plan
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.random_bits import random_notes
from jaxmem._target.devices.support import allowed_actions, budget_notes, unrolled_obstacle
from jaxmem._target.devices.target import Target
from jaxmem._trace.arguments import sized
from jaxmem._trace.donation import warn_of_copies
from jaxmem._trace.step import with_microbatches
from jaxmem.errors import StepError, TagError

_NO_CODECS = (
    "codecs are left out: the step takes a gradient of a gradient, and codes have no derivative"
)


@by_the_first
def plan(
    build,
    *args,
    budget=None,
    host_budget=None,
    target: str | Target = "local",
    actions: Sequence[Action | str] | str | None = None,
    codecs=None,
    outliers: Mapping[str, Mapping[str, int]] | None = None,
    microbatches: Sequence[int] | None = None,
    batch: str | None = None,
    sizes: Sequence[int] | None = None,
    measure: float | None = None,
    decide: Collection[str] = ("actions",),
    lossy_states: bool = False,
    fresh: bool = False,
) -> Plan:
    """Finds the actions under which a training step fits a byte budget at the least step time.

    XLA compiles the step under the returned plan, so that the step's bytes are known before it
    runs.

    build: a function of a plan. `build(plan)` returns the step: a function of `args`, or a
      `jax.jit` or `nnx.jit` function. A plain function is compiled with its first argument donated,
      and a jitted function is compiled as it is. `plan` is an object for `jaxmem.auto`,
      `jaxmem.remat_policy` and `jaxmem.stack`. `build(None)` returns the step as its author wrote
      it. If that step has checkpoints of its own, it is not the step with everything kept.
    args: the step's arguments: arrays, modules or `jax.ShapeDtypeStruct`s.
    budget: bytes of the whole step on one device: a number, a text such as "12GiB", or a share of
      the target's usable memory such as "90%". None means all usable memory.
    host_budget: bytes of offloaded tensors in host memory, for one device, in the forms of
      `budget`. None means the host memory of the target.
    target: the device: "local" for the device at hand. A GPU such as "h200" or "a100-80gb:8", or a
      TPU such as "v5e", "v5e:8" (chips) or "v5p:4x4x8", need not be at hand.
    actions: the allowed actions: `jaxmem.plans.LOSSLESS`, `jaxmem.plans.ALL`, several actions or
      their names, or a text such as "all", "lossless" or "keep,recompute". None allows all actions
      for tags, and lossless actions for values that `checkpoint_name` names. Recomputation is
      always allowed, as under every `jax.checkpoint`. With None, the plan has a lossy codec only if
      no lossless plan fits, or if the codec gains at least 2 % of the step time plus the
      uncertainty; a step with a gradient of a gradient gets no codec. With another value, a lossy
      codec needs a smaller gain, 0.2 % of the step time plus the uncertainty of the codec's time,
      and named values may be compressed too.
    codecs: a codec, or several codecs to choose from, for tags without a codec of their own; or a
      dict from kinds to codecs. None means the codec of each kind (Adacc §3.2). `bit_mask` is used
      for boolean tensors and the kind `mask` alone.
    outliers: counted outlier channels: block label -> tag -> number of channels. A codec that
      separates outliers gets capacity for this number (Adacc §3.4). `jaxmem.runs.Rectifier` counts
      outlier channels during training. None means the default capacities.
    microbatches: numbers of microbatches to choose from. For each number n, jaxmem plans
      `build(plan, microbatches=n)`. The fastest plan that fits is returned, with its number as
      `microbatches`. None means that `build` decides.
    batch: "max" or "fastest": jaxmem chooses the size of a minibatch, or a context length. Pass a
      plain function of the size in place of each argument that depends on the size, such as
      `lambda n: jax.ShapeDtypeStruct((n, 1024), jnp.int32)`. Arrays that the function returns are
      not allocated. "max" chooses the largest size whose plan fits. "fastest" chooses the size with
      the largest `size / predicted_seconds`. `Plan.batch` is the chosen size. None chooses no size.
    sizes: the candidate sizes for `batch`, such as `range(8, 4097, 8)`. None means the multiples of
      a base size. The base size is the first of m, 2m, 4m, ... for which the step can be traced,
      where m is the least common multiple of the numbers of microbatches and of devices.
    measure: seconds for which to run the likely fastest steps, in alternation, on the device at
      hand: the plan, hand-written policies that fit, and the plans that would be best under other
      prices. The fastest measured step is returned. If `actions` is None, a step with a lossy codec
      must be faster by at least 2 % plus the spread of the runs. `Plan.measured` lists all steps
      that ran. The compiles of these steps take additional time. Arguments that are shapes are
      filled with made-up numbers. None runs steps for comparison only if the step fits without a
      plan on the device at hand: then it and the plan run for three seconds.
    decide: what the plan decides. "actions" is required. "states", for a step from
      `jaxmem.released_step`, decides which layers keep their model states in device memory, and
      which layers' states are streamed from host memory, so that a model larger than the device can
      train. `budget` and `host_budget` then cover states and tensors together, and
      `Plan.place(state)` moves a state to the chosen memories. "sharding", for several devices,
      decides whether the moments (ZeRO-1) or all states are divided over the optimizer's
      `axis_name`, and whether the states are gathered at once or one layer at a time (ZeRO-3).
      "microbatches" chooses the number of microbatches among powers of two, if `microbatches` is
      None.
    lossy_states: whether the plan may store the optimizer's moments in 8 bits, for all layers or
      for none. True needs "states" in `decide`. The moments are in 8 bits if no plan with float
      moments fits, or if 8 bits gain at least 2 % of the step time plus the uncertainty.
      `Plan.moments` is the choice, and `build(plan)` returns a step with these moments.
      `Plan.place` converts a state with float moments. With False, the moments stay as the
      optimizer stores them.
    fresh: whether to plan without stored results. If True, jaxmem reads no times, compiles and
      searches of earlier plans, and writes new ones. Use `fresh=True` after the machine was
      changed, or was busy while times were measured.

    The actions are the optimum of a mixed-integer program (Adacc eq. 4-8, with five actions on the
    graph of a block). jaxmem solves the program again after each round of compiles, with the memory
    that the compiled steps needed. If several processes call `plan` with the same arguments, the
    first process plans, and each process compiles the plan's step.

    Raises BudgetError for a budget that cannot be read, and if no plan fits. The error has the
    least bytes that compiled, or the bytes of the arguments if the arguments alone exceed the
    budget; jaxmem then compiles nothing. With `batch`, the error has the smallest size and its
    least bytes. Raises StepError for a step without a block, for a `build` that does not pass its
    plan to every block, and for invalid arguments. Raises TargetError for an unknown target, for a
    target that cannot be compiled for, and for `measure` with a target that is not at hand. Raises
    TagError for tags that cannot be planned.
    """
    target = Target.parse(target)
    if measure is not None:
        check_measure(measure, target)
    wanted = check_decide(decide, target, measure, args)
    if STATES in wanted and SHARDING not in wanted:
        target = dataclasses.replace(target, devices=1)  # other devices at hand are not used
    if MICROBATCHES in wanted and microbatches is None:
        microbatches = numbers_for(args, target.devices if SHARDING in wanted else 1)
    check_batch(batch, sizes, args)
    check_lossy(lossy_states, wanted, batch)
    limit = parse_budget(budget, target.usable_bytes)
    host_room = parse_budget(host_budget, target.host_bytes, "host_budget")
    allowed, notes = allowed_choices(actions, codecs, outliers, target)
    notes += budget_notes(limit, target)
    with backend_for(target, database_for(fresh)) as backend:
        limits = Limits.on(backend, limit, host_room)

        def plan_for(args: tuple, measure: float | None, number: int | None) -> Plan:
            step = with_microbatches(build, number)

            def under(allowed: Allowed, notes: tuple[str, ...]) -> Plan:
                if STATES in wanted:
                    given = step, args, backend, limits, allowed
                    return plan_places(given, notes, wanted, lossy_states)
                traced = read_step(StepCompiler(step, args, backend), limits, allowed)
                return _plan(traced, limits, allowed, notes, measure)

            try:
                return under(allowed, notes)
            except TagError as error:
                if actions is not None or str(error) != TWICE:
                    raise
            # Only a program with a codec shows that the step differentiates a block twice.
            without_codecs, _ = allowed_choices(LOSSLESS, codecs, outliers, target)
            return under(without_codecs, (*notes, _NO_CODECS))

        def plan_at(args: tuple, measure: float | None) -> Plan:
            if microbatches is None:
                return plan_for(args, measure, None)
            return fastest_plan(checked(microbatches), functools.partial(plan_for, args, measure))

        if batch is None:
            return plan_at(args, measure)
        most = None if microbatches is None else max(checked(microbatches))
        most_build = with_microbatches(build, most)
        step_sizes = StepSizes(most_build, args, backend, limits, wanted, allowed)
        sized_plan = of_size(
            batch,
            Boundary(
                possible(step_sizes, sizes, microbatches),
                step_sizes.least,
                limits.usable_bytes,
                lambda size: plan_at(sized(args, size), None),
                step_sizes.searched,
            ),
            step_sizes.kept,
        )
        if measure is None:
            return sized_plan
        assert sized_plan.batch is not None
        timed = plan_at(sized(args, sized_plan.batch), measure)
        return dataclasses.replace(timed, batch=sized_plan.batch)


def database_for(fresh: bool) -> Database:
    """The database, which reads nothing that was stored earlier if `fresh` is True. Raises
    StepError if `fresh` is no boolean.
    """
    if not isinstance(fresh, bool):
        raise StepError(f"plan: `fresh` is {fresh!r}; expected True or False")
    # The database reads no entry that was written before `since`. It always writes.
    return Database(since=time.time() if fresh else 0.0)


def allowed_choices(
    actions: Sequence[Action | str] | str | None,
    codecs,
    outliers: Mapping[str, Mapping[str, int]] | None,
    target: Target,
) -> tuple[Allowed, tuple[str, ...]]:
    """The actions and codecs that the arguments of `plan` allow on a target, and notes for the user
    about actions that are left out. Raises TagError, StepError and TargetError as `plan` does.
    """
    able, notes = allowed_actions(ALL if actions is None else actions, target)
    by_default = actions is None
    named = tuple(a for a in able if not by_default or not a.encodes)
    codecs, counted = checked_codecs(codecs), checked_outliers(outliers)
    allowed = Allowed(able, named, codecs=codecs, outliers=counted, codecs_by_default=by_default)
    return allowed, notes


def _plan(
    step: TracedStep,
    limits: Limits,
    allowed: Allowed,
    notes: tuple[str, ...],
    measure: float | None,
) -> Plan:
    """Makes the plan for one number of microbatches.

    limits: the bytes that the plan may take.
    allowed: the actions and codecs that the step was traced with.
    notes: sentences for the user that precede the plan's other notes.
    measure: seconds for runs of the fastest steps; None runs no step.
    """
    target, profile, jaxpr = step.target, step.profile, step.traced.jaxpr
    warn_of_copies(step.traced, step.compiler.args, "plan")
    _warn_of_unrolled(profile, target, step.arguments, limits)
    _warn_of_waste(profile)
    _warn_of_no_tags(profile, jaxpr, step.shards)
    # Search: solve and compile in alternation.
    search = step.search(limits, allowed.codecs_by_default)
    find_plan(search, step.arguments)
    # The profile with codecs for values that `checkpoint_name` names, for advice to the user.
    wider = lambda: silently(step.wider)
    if search.best is None:
        hint = would_fit(search, wider) if allowed.named_values != allowed.actions else ""
        largest = listed(unnamed(jaxpr, step.shards))
        raise infeasible(search, largest, hint)
    notes += step.notes + _time_notes(profile) + _gap_notes(search.best.gap)
    notes += random_notes(jaxpr.jaxpr, target)
    runs, notes_of_runs = compare_by_runs(search, measure)
    notes += notes_of_runs
    if allowed.named_values != allowed.actions and search.best is not search.baseline:
        notes += would_save(search, search.best, wider)
    notes += _kernel_notes(search.estimates.more_by_kernels(search.best.actions))
    return searched_plan(search, notes, runs)


def _time_notes(profile: Profile) -> tuple[str, ...]:
    """A note for the user, if times were measured while the machine was busy with other work."""
    if profile.disturbed < 0.05:
        return ()
    return (
        f"{profile.disturbed:.0%} of the times were measured while the machine was busy, and may be"
        f" too long; a plan made in {RETRY_SECONDS // 60} minutes or later measures these times"
        " again, and a plan made with `fresh=True` measures them at once",
    )


def _gap_notes(gap: float) -> tuple[str, ...]:
    """A note for the user, if the plan is not proven to be the fastest.

    gap: the share of the decided time by which the optimum may be faster.
    """
    if gap < 0.001:
        return ()
    if math.isinf(gap):
        return ("the assignment is not proven fastest: an unknown share of its time may be gained",)
    return (
        "the solver's time ran out before the assignment was proven fastest:"
        f" {gap:.1%} of what it decides about may be gained",
    )


def _kernel_notes(more: int | None) -> tuple[str, ...]:
    """A note for the user, if codecs were compiled as their references and not as kernels.

    more: the bytes that the kernels are expected to take in addition to their references; None if
      no codec was compiled as its reference.
    """
    if more is None:
        return ()
    size = f"{show_bytes(abs(more))} {'more' if more > 0 else 'less'}" if more else "as much"
    return (
        "codecs were compiled as their references, which XLA divides, since the devices are not at"
        " hand; on the devices, kernels run in place of the references that have a kernel, and are"
        f" expected to take {size}",
    )


def _warn_of_unrolled(profile: Profile, target: Target, arguments: int, limits: Limits) -> None:
    """Warns, before the first compile, of layers without a loop, for which a plan saves little on
    this target. There is no warning if everything kept fits.

    arguments: bytes of the step's arguments.
    """
    obstacle = unrolled_obstacle(target)
    kept = sum(b.layers * b.everything_bytes for b in profile.blocks)
    if not profile.unrolled or obstacle is None or arguments + kept <= limits.usable_bytes:
        return
    warn(
        f"plan: the layers of block {', '.join(map(repr, profile.unrolled))} follow each other"
        f" without a loop, and {obstacle}: recomputing saves little here; loop over them with"
        " jax.lax.scan, update jaxlib, or plan for a GPU with target="
    )


def _warn_of_waste(profile: Profile) -> None:
    """Warns of tags that are saved in vain by the plan that keeps every tag."""
    every_tag = {b.name: {t.name: KEEP for t in b.tags} for b in profile.blocks}
    if price_of(profile, every_tag) is None:  # KEEP is not among the allowed actions
        return
    for message in waste.warnings(profile, every_tag):
        warn(f"jaxmem: {message}")


def _warn_of_no_tags(profile: Profile, jaxpr, shards: int) -> None:
    """Warns of blocks without a tag, and names the largest tensors that a tag could name."""
    tagged = {block.name for block in profile.blocks if block.tags}
    for label in dict.fromkeys(b.name for b in profile.blocks if b.name not in tagged):
        largest = unnamed(jaxpr, shards, label)
        if is_auto(label) and not largest:
            continue  # the user wrote no block, and there is nothing to tag
        warn(
            f"jaxmem: block {label!r} has no tag, so that a plan can only keep all of it or"
            " recompute all of it; the largest tensors that its backward reads are"
            f" {listed(largest) or 'its inputs'}; name what is dear to recompute by jaxmem.tag"
        )

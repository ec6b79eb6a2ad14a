"""price() and estimate(): the bytes and seconds of an assignment that a user wrote, or of a plan.

price() compiles the step; estimate() does not compile it fully.
"""

import dataclasses

from jaxmem._core.actions import ALL, AS_WRITTEN, Actions, Choice
from jaxmem._core.assignment import Assignment, Decisions, leaves_as_written
from jaxmem._core.groups import as_decided, group_label, keeps_everything, ungrouped
from jaxmem._core.profile import BlockClass, Profile, Tag
from jaxmem._cost.profile.options import Allowed
from jaxmem._planner.outcome.searched import searched_plan
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.search.estimates import Estimates
from jaxmem._planner.search.trial import Limits, Trial, cost_as_written
from jaxmem._planner.solve.cost import evaluate, everything
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.traced_step import TracedStep, read_step
from jaxmem._result.plan.plan import Plan
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.devices.support import allowed_actions
from jaxmem._target.devices.target import Target
from jaxmem.errors import TagError

UNLIMITED = 2**62  # bytes


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated bytes and time of a step under an assignment, on one device.

    bytes: bytes of the step at its peak: arguments, results and temporaries.
    baseline_bytes: bytes of the step with everything kept.
    saved_bytes: bytes that the blocks save for the backward. This number is exact.
    arguments_bytes: bytes of the step's arguments. This number is exact.
    seconds_more: seconds per step in addition to the step with everything kept. The number is
      negative if the step is faster.
    time_source: the source of the times of pieces: "measured", "xla" or "roofline".
    """

    bytes: int
    baseline_bytes: int
    saved_bytes: int
    arguments_bytes: int
    seconds_more: float
    time_source: str


def estimate(build, assignment: Decisions, *args, target: str | Target = "local") -> Estimate:
    """Estimates the bytes and the time of a step under an assignment, without a full compile.

    build, args, target: as for `jaxmem.plan`.
    assignment: the actions, such as `jaxmem.plans.Assignment({"block": {"up": Choice("keep")}})`,
      or a plan. `jaxmem.plans.price` takes the same assignments, compiles the step, and returns
      compiled bytes.

    The bytes come from a liveness estimate of the traced step, with the fusions and the order of
    operations that XLA is expected to choose. A liveness estimate is neither an upper nor a lower
    bound. For a named TPU, libtpu compiles the step for buffers, and the bytes come from libtpu's
    buffer assignment. The seconds come from the cost model. The cost model adds up times of pieces,
    which jaxmem measures, or takes from XLA's estimates, if they are not stored from an earlier
    plan.

    Raises TagError, StepError and TargetError as `jaxmem.plans.price` does. Raises TagError also
    for an assignment that leaves a step with checkpoints of its own as written, because these
    checkpoints have no price without a compile.
    """
    target = Target.parse(target)
    with backend_for(target) as backend:
        step, whole, profile, actions = _read(build, assignment, args, backend, "estimate")
        cost = evaluate(profile, actions)
        if leaves_as_written(assignment) and step.history_as_written is not None:
            raise TagError(
                "estimate: `assignment` leaves the step as written, whose own checkpoints have no"
                " price without a compile; expected actions for its blocks, or use"
                " jaxmem.plans.price, which compiles it"
            )
        estimates = Estimates(step.compiler, whole, step.shards)
        return Estimate(
            bytes=step.arguments + estimates.estimate_step(actions)[0],
            baseline_bytes=step.arguments + estimates.estimate_step(whole.everything_kept)[0],
            saved_bytes=cost.saved_bytes,
            arguments_bytes=step.arguments,
            seconds_more=cost.seconds - everything(whole).seconds,
            time_source=whole.time_source,
        )


def price(build, assignment: Decisions, *args, target: str | Target = "local") -> Plan:
    """Compiles a step under an assignment written by hand, and returns the assignment as a plan.

    The plan has the bytes and times of the step, and the bytes and times of the step with
    everything kept. For each tag, the plan's table shows the cost or the gain of the next best
    choice. The plan's `budget_bytes` are its compiled bytes.

    build, args, target: as for `jaxmem.plan`.
    assignment: the actions, such as `jaxmem.plans.Assignment({"block": {"up": Choice("keep")}})`.
      The assignment may have separate actions for groups of layers. A plan is accepted too, and is
      priced again.

    Raises TagError if the assignment names a block, a group of layers or a tag that the step does
    not have. Raises TagError also for a choice that the tag or the target does not support. Raises
    StepError and TargetError as `jaxmem.plan` does.
    """
    target = Target.parse(target)
    with backend_for(target) as backend:
        step, whole, profile, actions = _read(build, assignment, args, backend, "price")
        cost, is_divided = evaluate(profile, actions), profile.blocks != whole.blocks
        has_checkpoints = step.history_as_written is not None
        as_written = leaves_as_written(assignment)
        wanted = [whole.everything_kept, *([AS_WRITTEN] if has_checkpoints else [])]
        is_new = not keeps_everything(actions) and not as_written
        compiled = step.compiler.compile_buffers(*wanted, *([actions] if is_new else []))
        for one in compiled:  # so that a later `plan` for these bytes need not compile it again
            history_as_written = step.history_as_written if one.actions == AS_WRITTEN else None
            (history_as_written or step.history).remember(one)
    kept, *others = compiled
    baseline = Trial(kept, everything(whole), kept.compiled.total_bytes)
    written = None if step.planned else baseline
    if has_checkpoints:
        of_checkpoints = cost_as_written(whole, baseline, others[0])
        written = Trial(others[0], of_checkpoints, others[0].compiled.total_bytes)
    asked = Trial(compiled[-1], cost, compiled[-1].compiled.total_bytes)
    trial = asked if is_new else (written if as_written and written else baseline)
    limits = Limits(trial.total, UNLIMITED, UNLIMITED)
    # The memory model is fitted to undivided plans only.
    plan_trials = [trial] if is_new and not is_divided else []
    search = dataclasses.replace(step.search(limits), profile=whole, plan_trials=plan_trials)
    search.trial_as_written, search.baseline = written, baseline
    search.best, search.divided_problem = trial, ActionProblem(profile) if is_divided else None
    return searched_plan(search, step.notes, taken="it was asked for")


def _read(
    build, assignment: Decisions, args: tuple, backend: Backend, what: str
) -> tuple[TracedStep, Profile, Profile, Actions]:
    """Reads the step that `build` returns, and an assignment, without a compile of the step.

    Returns the step; its profile with undivided layers, and with only the codecs that the
    assignment names; the same profile with the layers divided into the assignment's groups; and the
    assignment's choices for each block, or for each group of layers.

    what: the public function that error messages name.

    Raises TagError if `assignment` is not an assignment, if it names a block, layers or a tag that
    the step lacks, and if it names a choice that the tag or the target does not support. Raises
    StepError as `jaxmem.plan` does.
    """
    if not isinstance(assignment, Decisions):
        raise TagError(
            f"{what}: `assignment` is {type(assignment).__name__}; expected a"
            " jaxmem.plans.Assignment, or a plan"
        )
    allowed, _ = allowed_actions(ALL, backend.target)
    compiler = StepCompiler(build, args, backend)
    step = read_step(compiler, None, Allowed(allowed, allowed, codecs=_codecs(assignment)))
    # An assignment that leaves the step as written has no choices; callers compile the step as
    # written.
    kept = Assignment.everything() if leaves_as_written(assignment) else assignment
    actions = _decided(step.profile, kept, what)
    whole = _only_chosen(step.profile, actions)
    divided = dataclasses.replace(whole, blocks=as_decided(whole.blocks, actions))
    return step, whole, divided, actions


def _decided(profile: Profile, assignment: Decisions, what: str) -> Actions:
    """The assignment's choices for each block of the step, or for each group of layers. Raises
    TagError for blocks and layers that the step lacks.
    """
    actions: Actions = {}
    for block in profile.blocks:
        groups = assignment.groups(block.name)
        # Each group begins at the end of the group before it. The last group ends at the number of
        # layers.
        ends = [0, *(stop for _, stop, *_ in groups)]
        if groups and (ends[:-1] != [a for a, *_ in groups] or ends[-1] != block.divisible):
            shown = ", ".join(group_label(block.name, *group) for group in groups)
            can = f"has {block.divisible} layers" if block.divisible else "cannot be divided"
            raise TagError(
                f"{what}: `assignment` decides {shown}, and block {block.name!r} {can}; groups"
                " follow each other from 0 to the number of layers, in jaxmem.stack or under"
                " jaxmem.auto"
            )
        if block.rerun_seconds is None and any(len(group) > 2 for group in groups):
            raise TagError(
                f"{what}: `assignment` decides layers of block {block.name!r} in spans, and the"
                " step's loop over them runs no spans; expected the loop of jaxmem.stack, of"
                " jaxmem.released_step, or of jaxmem.auto, with all layers in one stack in device"
                " memory, or in a Python loop under jaxmem.auto"
            )
        for name in [group_label(block.name, *group) for group in groups] or [block.name]:
            actions[name] = dict(assignment.choices_for(name))
    known = {*actions, *profile.idle_blocks}
    if unknown := sorted(set(getattr(assignment, "actions", {})) - known):
        raise TagError(
            f"{what}: `assignment` names block {unknown[0]!r}; the step has"
            f" {', '.join(map(repr, sorted(known)))}"
        )
    return actions


def _only_chosen(profile: Profile, actions: Actions) -> Profile:
    """The profile in which a tag has only the codecs that the assignment names for this tag. The
    other codecs of the assignment have prices for every tag, and no plan compares these prices.
    """

    def option_is_meant(label: str, name: str, choice: Choice) -> bool:
        of_label = (tags for block, tags in actions.items() if ungrouped(block) == label)
        chosen = {tags[name].codec for tags in of_label if name in tags}
        return choice.codec is None or choice.codec in chosen

    def with_fewer(block: BlockClass, tag: Tag) -> Tag:
        kept = tuple(o for o in tag.options if option_is_meant(block.name, tag.name, o.choice))
        return dataclasses.replace(tag, options=kept)

    blocks = (
        dataclasses.replace(b, tags=tuple(with_fewer(b, tag) for tag in b.tags))
        for b in profile.blocks
    )
    return dataclasses.replace(profile, blocks=tuple(blocks))


def _codecs(assignment: Decisions) -> list[str] | None:
    """The codecs that the assignment names, which get prices in addition to the codec of each kind;
    None if it names no codec.
    """
    named = getattr(assignment, "actions", {})
    chosen = {c.codec for tags in named.values() for c in tags.values() if c.codec is not None}
    return sorted(chosen) or None

"""Reads a step, and prices an assignment that was written by hand, or a plan."""

import dataclasses

from jaxmem._core.actions import ALL, Actions, Choice
from jaxmem._core.assignment import Assignment, Decisions, leaves_as_written
from jaxmem._core.groups import as_decided, group_label, ungrouped
from jaxmem._core.profile import BlockClass, Profile, Tag
from jaxmem._cost.profile.options import Allowed
from jaxmem._planner.read import TracedStep, read_step
from jaxmem._planner.solve.cost import Cost, evaluate
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.devices.support import allowed_actions
from jaxmem.errors import TagError


@dataclasses.dataclass(frozen=True)
class ByHand:
    """A step with an assignment that was written by hand.

    step: the step.
    whole: the step's profile with undivided layers, and with only the codecs that the assignment
      names.
    profile: the profile `whole` with its layers divided into the assignment's groups.
    actions: the assignment's choices for each block, or for each group of layers.
    cost: the cost of `actions`.
    """

    step: TracedStep
    whole: Profile
    profile: Profile
    actions: Actions
    cost: Cost

    @property
    def is_divided(self) -> bool:
        """Whether the assignment has separate choices for groups of layers."""
        return len(self.profile.blocks) > len(self.whole.blocks)


def read_by_hand(build, assignment: Decisions, args: tuple, backend: Backend, what: str) -> ByHand:
    """Reads the step that `build` returns, and prices the assignment without a compile of the step.

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
    step = read_step(
        build, args, backend, None, Allowed(allowed, allowed, codecs=_codecs(assignment))
    )
    # An assignment that leaves the step as written has no choices; callers compile the step as
    # written.
    kept = Assignment.everything() if leaves_as_written(assignment) else assignment
    actions = _decided(step.profile, kept, what)
    whole = _only_chosen(step.profile, actions)
    profile = dataclasses.replace(whole, blocks=as_decided(whole.blocks, actions))
    return ByHand(step, whole, profile, actions, evaluate(profile, actions))


def _decided(profile: Profile, assignment: Decisions, what: str) -> Actions:
    """The assignment's choices for each block of the step, or for each group of layers. Raises
    TagError for blocks and layers that the step lacks.
    """
    actions: Actions = {}
    for block in profile.blocks:
        groups = assignment.groups(block.name)
        # Each group begins at the end of the group before it. The last group ends at the number of
        # layers.
        ends = [0, *(stop for _, stop in groups)]
        if groups and (ends[:-1] != [a for a, _ in groups] or ends[-1] != block.divisible):
            shown = ", ".join(group_label(block.name, *group) for group in groups)
            can = f"has {block.divisible} layers" if block.divisible else "cannot be divided"
            raise TagError(
                f"{what}: `assignment` decides {shown}, and block {block.name!r} {can}; groups"
                " follow each other from 0 to the number of layers, in jaxmem.stack or under"
                " jaxmem.auto"
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

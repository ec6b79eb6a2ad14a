"""Reads a step and an assignment that was written by hand, or a plan, and prices it."""

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
    """A step, and what an assignment decides about it.

    step: the step.
    whole: its profile, with its layers undivided and with the codecs that the assignment names.
    profile: the same, with its layers divided as the assignment divides them.
    actions: what the assignment says of each block, or of each group of its layers.
    cost: what that costs.
    """

    step: TracedStep
    whole: Profile
    profile: Profile
    actions: Actions
    cost: Cost

    @property
    def is_divided(self) -> bool:
        """Whether groups of layers are decided apart."""
        return len(self.profile.blocks) > len(self.whole.blocks)


def read_by_hand(build, assignment: Decisions, args: tuple, backend: Backend, what: str) -> ByHand:
    """Reads the step that `build` returns, and prices the assignment; nothing is compiled.

    what: the public function that errors are from.

    Raises TagError if the assignment is none, or names a block, layers or a tag that the step
    lacks, or a choice that the tag or the target cannot take; StepError as `jaxmem.plan`.
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
    # An assignment that leaves the step as written decides no block: callers compile that step.
    kept = Assignment.everything() if leaves_as_written(assignment) else assignment
    actions = _decided(step.profile, kept, what)
    whole = _only_chosen(step.profile, actions)
    profile = dataclasses.replace(whole, blocks=as_decided(whole.blocks, actions))
    return ByHand(step, whole, profile, actions, evaluate(profile, actions))


def _decided(profile: Profile, assignment: Decisions, what: str) -> Actions:
    """What the assignment says of each block of the step, or of each group of its layers. Raises
    TagError for blocks and layers that the step lacks.
    """
    actions: Actions = {}
    for block in profile.blocks:
        groups = assignment.groups(block.name)
        # Each group begins where the one before it ends, and the last one ends with the layers.
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
    """The profile without codecs that the assignment names for other tags: they were given prices
    for every tag, and are compared with nothing.
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
    """The codecs that it names, which are given prices beside the kinds' own; None for no codec."""
    named = getattr(assignment, "actions", {})
    chosen = {c.codec for tags in named.values() for c in tags.values() if c.codec is not None}
    return sorted(chosen) or None

"""price(): what an assignment that was written by hand takes, in bytes and time, as a plan."""

import dataclasses

from jaxmem._core.actions import ALL, Actions, Choice, keeps_everything
from jaxmem._core.assignment import Decisions
from jaxmem._core.groups import as_decided
from jaxmem._core.labels import group_label, ungrouped
from jaxmem._core.profile import BlockClass, Profile, Tag
from jaxmem._device.support import allowed_actions
from jaxmem._device.target import Target
from jaxmem._plan.plan import Plan
from jaxmem._planner.outcome import Spent, outcome
from jaxmem._planner.read import read_step
from jaxmem._search.divide import Division, Groups
from jaxmem._search.search import Found
from jaxmem._search.trials import Limits, Trial, Trials
from jaxmem._solver.cost import evaluate, everything
from jaxmem._solver.problem import Problem
from jaxmem._solver.solution import priced
from jaxmem._xla.backend import backend_for
from jaxmem.errors import TagError

UNLIMITED = 2**62  # bytes


def price(build, assignment: Decisions, *args, target: str | Target = "local") -> Plan:
    """Returns the plan that an assignment written by hand is: compiled, with its bytes and times
    beside those of the step with everything kept, and a table that says what the next best choice
    for each tag would cost or gain.

    build, args, target: as for `jaxmem.plan`.
    assignment: such as `jaxmem.plans.Assignment({"block": {"up": Choice("keep")}})`; it may decide
      groups of layers apart. A plan is priced anew.

    `budget_bytes` is what it compiles to.

    Raises TagError if it names a block, layers or a tag that the step lacks, or a choice that the
    tag or the target cannot take; StepError and TargetError as `jaxmem.plan`.
    """
    if not isinstance(assignment, Decisions):
        raise TagError(
            f"price: `assignment` is {type(assignment).__name__}; expected a"
            " jaxmem.plans.Assignment, or a plan"
        )
    target = Target.parse(target)
    allowed, _ = allowed_actions(ALL, target)
    with backend_for(target) as backend:
        step = read_step(build, args, backend, None, allowed, allowed, _codecs(assignment))
        actions = _decided(step.profile, assignment)
        whole = _only_chosen(step.profile, actions)
        blocks = as_decided(whole.blocks, actions)
        profile = dataclasses.replace(whole, blocks=blocks)
        cost = evaluate(profile, actions)  # what it lacks is an error before anything is compiled
        wanted = [whole.everything_kept, *([] if keeps_everything(actions) else [actions])]
        kept, *others = step.steps.compile(*wanted)
        for compiled in (kept, *others):  # a plan for so many bytes finds it again
            step.history.remember(compiled)
    own = others[0] if others else kept
    total = own.compiled.total_bytes
    trial = Trial(own, cost, total)
    baseline = Trial(kept, everything(whole), kept.compiled.total_bytes)
    limits = Limits(total, UNLIMITED, UNLIMITED)
    apart = len(blocks) > len(whole.blocks)  # the memory model is of layers alike
    trials = Trials(whole, limits, baseline, [] if apart else [trial])
    division = _division(profile, actions) if apart else None
    spent = Spent(step.seconds, 0.0, step.steps.seconds, step.steps.compiles)
    found = Found(trials, trial, division, 0.0)
    return outcome(found, target, spent, step.notes, taken="it was asked for")


def _decided(profile: Profile, assignment: Decisions) -> Actions:
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
                f"price: `assignment` decides {shown}, and block {block.name!r} {can}; groups"
                " follow each other from 0 to the number of layers, in jaxmem.stack or under"
                " jaxmem.auto"
            )
        for name in [group_label(block.name, *group) for group in groups] or [block.name]:
            actions[name] = dict(assignment.choices_for(name))
    known = {*actions, *profile.idle_blocks}
    if unknown := sorted(set(getattr(assignment, "actions", {})) - known):
        raise TagError(
            f"price: `assignment` names block {unknown[0]!r}; the step has"
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


def _division(profile: Profile, actions: Actions) -> Division:
    problem = Problem(profile)
    return Division(Groups(profile), problem, priced(problem, actions), 0)

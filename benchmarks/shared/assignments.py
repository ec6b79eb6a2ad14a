"""Assignments of every kind for a profile: one action for all tags, random ones, solved ones."""

import random
from collections.abc import Callable, Mapping, Sequence

from jaxmem._core.actions import KEEP, RECOMPUTE, UNTAGGED, Action, Actions, Choice
from jaxmem._core.profile import Profile, Tag
from jaxmem._planner.solve.cost import effective, evaluate
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solve import solve

ROOMS = (0.5, 0.2, 0.08)  # of the bytes of all tags


def every(profile: Profile, choose: Callable[[Tag], Choice], rest: bool = False) -> Actions:
    """`choose(tag)` for every tag; with `rest`, what no tag names is kept too."""
    named = {UNTAGGED: KEEP} if rest else {}
    return {b.name: {t.name: choose(t) for t in b.tags} | named for b in profile.blocks}


def keep_tags(profile: Profile) -> Actions:
    """Every tag kept, all else recomputed."""
    return every(profile, lambda _: KEEP)


def keep_everything(profile: Profile) -> Actions:
    """Nothing under a checkpoint."""
    return every(profile, lambda _: KEEP, rest=True)


def under(profile: Profile, action: Action) -> Actions:
    """Every tag under its first option of an action; recomputed where it has none."""
    options = lambda tag: (o.choice for o in tag.options if o.choice.action is action)
    return every(profile, lambda tag: next(options(tag), RECOMPUTE))


def drawn(profile: Profile, pick: Callable[[Sequence[Choice]], Choice]) -> Actions:
    """`pick` of each tag's choices."""
    found = profile.everything_recomputed
    for (block, tag), choices in ActionProblem(profile).open_choices().items():
        found[block][tag] = pick(choices)
    return found


def solved(profile: Profile, share: float, solver: Callable = solve, **given) -> Actions | None:
    """A solver's answer for a share of the bytes of all tags."""
    most = evaluate(profile, keep_tags(profile)).saved_bytes
    solution = solver(ActionProblem(profile, room=int(share * most), **given))
    return None if solution is None else solution.actions


def plans(profile: Profile, seed: object) -> dict[str, Actions]:
    """One action for all tags, three random assignments and solved ones, by name."""
    found = {
        "keep everything": keep_everything(profile),
        "keep": keep_tags(profile),
        "recompute": profile.everything_recomputed,
    }
    for action in (Action.COMPRESS, Action.OFFLOAD, Action.COMPRESS_OFFLOAD):
        actions = under(profile, action)
        if any(c != RECOMPUTE for tags in actions.values() for c in tags.values()):
            found[action.value] = actions
    for number in range(3):
        found[f"random {number}"] = drawn(profile, random.Random(f"{seed} {number}").choice)
    for share in ROOMS:
        actions = solved(profile, share)
        if actions is not None:
            found[f"solved {share}"] = actions
    return found


def different(profile: Profile, found: Mapping[str, Actions]) -> dict[str, Actions]:
    """Those that do not come to the same as an earlier one."""
    unique: dict[str, str] = {}
    for name, actions in found.items():
        unique.setdefault(repr(sorted(effective(profile, actions).items())), name)
    return {name: found[name] for name in unique.values()}


def is_lossless(actions: Actions) -> bool:
    """Whether nothing is stored in a codec, but in the codec of masks, which is exact."""
    choices = (choice for tags in actions.values() for choice in tags.values())
    return all(c.codec is None or c.codec.startswith("bit_mask") for c in choices)


def show(actions: Actions) -> dict[str, dict[str, str]]:
    return {b: {t: str(c) for t, c in tags.items()} for b, tags in actions.items()}

"""Assignments of every kind for a profile: one action for all tags, random ones, solved ones, and
the experiments' named policies (`experiments/running/policies.py`) as actions in the planner's cost
model.

JAX's own policies are run as they are, and priced as the nearest keep-set. Left out: full
recomputation of every k-th layer, since a profile gives all layers of a block one decision;
`experiments.gpu_check` times it.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

import jaxmem
from experiments.running.policies import JAX_POLICIES, KEPT, OFFLOADED, own
from experiments.running.policies import naive as naive_codec
from jaxmem._core.actions import KEEP, OFFLOAD, RECOMPUTE, Action, Actions, Choice
from jaxmem._core.assignment import Assignment
from jaxmem._core.profile import Profile, Tag
from jaxmem._planner.solve.cost import effective, evaluate
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solve import solve

ROOMS = (0.5, 0.2, 0.08)  # of the bytes of all tags
NAIVE = naive_codec(None)
WITH_NAIVE = {  # the codecs to profile with, by kind
    kind: [own(kind), NAIVE] for kind in jaxmem.codecs.KINDS if kind not in ("mask", "exact")
}
DOTS = ("qkv", "mid", "up")  # products without batch dimensions that the backward needs


def every(profile: Profile, choose: Callable[[Tag], Choice]) -> Actions:
    """`choose(tag)` for every tag."""
    return {b.name: {t.name: choose(t) for t in b.tags} for b in profile.blocks}


def keep_tags(profile: Profile) -> Actions:
    """Every tag kept, all else recomputed."""
    return every(profile, lambda _: KEEP)


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
        "keep everything": profile.everything_kept,
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


# -- named policies


@dataclasses.dataclass(frozen=True, eq=False)
class Baseline:
    """`actions`: the nearest assignment that the profile prices."""

    name: str
    actions: Actions

    @property
    def exact(self) -> bool:
        """Whether the policy is these actions, or JAX's own that comes near them."""
        return self.name == "nothing_saveable" or self.name not in JAX_POLICIES

    @property
    def policy(self) -> Callable[..., object]:
        """For `jax.checkpoint`."""
        return JAX_POLICIES.get(self.name) or jaxmem.remat_policy(Assignment(self.actions))


def baselines(profile: Profile) -> list[Baseline]:
    """The baselines that `profile` prices. A profile has prices for offload, and for naive INT4,
    only if it was made with these choices.
    """
    found = {
        "keep_everything": profile.everything_kept,
        "keep_tags": keep_tags(profile),
        "nothing_saveable": profile.everything_recomputed,
        "dots_with_no_batch_dims_saveable": keep_set(profile, DOTS),
    }
    found |= {name: keep_set(profile, tags) for name, tags in KEPT.items()}
    if prices(profile, OFFLOAD):
        offloaded = {"offload_dot_with_no_batch_dims": DOTS} | OFFLOADED
        found |= {name: keep_set(profile, tags, OFFLOAD) for name, tags in offloaded.items()}
    if prices(profile, Choice(Action.COMPRESS, NAIVE)):
        found["naive_int4_everywhere"] = every(profile, naive)
    return [Baseline(name, actions) for name, actions in found.items()]


def naive(tag) -> Choice:
    """Per-token INT4 for what is a number, one bit for what is a mask."""
    return Choice(Action.COMPRESS, naive_codec(kind_of(tag)))


def own_codec(tag) -> Choice:
    """The codec of the tag's kind (Adacc 3.2)."""
    return Choice(Action.COMPRESS, own(kind_of(tag)))


def kind_of(tag) -> str | None:
    return "mask" if tag.dtype == "bool" else tag.kind


def keep_set(profile: Profile, tags: tuple[str, ...], choice: Choice = KEEP) -> Actions:
    """`choice` for `tags`, where the model has them; all else is recomputed."""
    return {b.name: {t.name: choice for t in b.tags if t.name in tags} for b in profile.blocks}


def prices(profile: Profile, choice: Choice) -> bool:
    return any(o.choice == choice for b in profile.blocks for t in b.tags for o in t.options)

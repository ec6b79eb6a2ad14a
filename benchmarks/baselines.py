"""What a JAX user would pick today, as policies for the experiments' GPT and as actions in the planner's cost model.

Names of the GPT's tags against those of MaxText's policies: `qkv` is query_proj, key_proj and value_proj; `attn` is
context; `mid` stands for out_proj (the residual stream after it: as many bytes, and what is recomputed is the same but
for an addition); `up` is mlpwi. mlpwo is read by no backward, so saving it changes nothing. A MaxText policy is run as
the keep-set of these tags, which is `save_only_these_names` on them; JAX's own policies are run as they are, and priced
as the nearest keep-set. Adacc's full recomputation is `nothing_saveable`, MaxText's `full`.

XLA's own rematerialization is on by default and so in every one of them; `keep_everything` is what it has alone.
Left out: full recomputation of every k-th block, since the GPT scans one body over all of its layers.
"""

import dataclasses
from collections.abc import Callable

import jax

import jaxmem
from jaxmem._plan import Draft
from jaxmem._types import KEEP, OFFLOAD, REST, Action, Actions, Choice, Profile

NAIVE = "naive_per_token(scale=bfloat16)"
KEPT = {
    "save_out_proj": ("mid",),
    "save_qkv_proj": ("qkv",),
    "save_dot_except_mlp": ("qkv", "mid"),
    "save_dot_with_context_except_mlp": ("qkv", "attn", "mid"),
    "minimal": ("qkv", "mid", "up"),
    "minimal_with_context": ("qkv", "attn", "mid", "up"),
}
OFFLOADED = {"qkv_proj_offloaded": ("qkv",), "minimal_offloaded": ("qkv", "mid", "up")}
DOTS = ("qkv", "mid", "up")  # products without batch dimensions that the backward needs


@dataclasses.dataclass(frozen=True, eq=False)
class Baseline:
    """`policy`: for `jax.checkpoint`. `actions`: the nearest assignment that the profile prices.

    `exact`: whether the policy is those actions, or JAX's own that comes near them. `lossy`: compresses.
    """

    name: str
    policy: Callable[..., object]
    actions: Actions
    exact: bool = True
    lossy: bool = False


def baselines(profile: Profile) -> list[Baseline]:
    """The baselines that `profile` prices: those that offload, or use naive INT4, only if it was made with them."""
    jax_policies = jax.checkpoint_policies
    dots = jax_policies.dots_with_no_batch_dims_saveable
    found = [
        of_choices("keep_everything", profile, lambda *_: KEEP, rest=True),
        of_choices("keep_tags", profile, lambda *_: KEEP),
        Baseline("nothing_saveable", jax_policies.nothing_saveable, keep_set(profile, ())),
        Baseline("dots_with_no_batch_dims_saveable", dots, keep_set(profile, DOTS), exact=False),
    ]
    found += [of_actions(name, keep_set(profile, tags)) for name, tags in KEPT.items()]
    if prices(profile, OFFLOAD):
        offload_dots = jax_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
        found.append(
            Baseline("offload_dot_with_no_batch_dims", offload_dots, keep_set(profile, DOTS, OFFLOAD), exact=False)
        )
        found += [of_actions(name, keep_set(profile, tags, OFFLOAD)) for name, tags in OFFLOADED.items()]
    if prices(profile, Choice(Action.COMPRESS, NAIVE)):
        found.append(of_choices("naive_int4_everywhere", profile, naive, lossy=True))
    return found


def naive(tag) -> Choice:
    """Per-token INT4 for what is a number, one bit for what is a mask."""
    codec = "bit_mask()" if tag.dtype == "bool" else NAIVE
    return Choice(Action.COMPRESS, codec)


def own_codec(tag) -> Choice:
    """The codec of the tag's kind (Adacc 3.2)."""
    kind = "mask" if tag.dtype == "bool" else tag.kind
    return Choice(Action.COMPRESS, str(jaxmem.codecs.default_for(kind)))


def of_choices(name: str, profile: Profile, choose, rest: bool = False, lossy: bool = False) -> Baseline:
    """`choose(tag)` for every tag; with `rest`, what no tag names is kept too."""
    actions = {b.name: {t.name: choose(t) for t in b.tags} | ({REST: KEEP} if rest else {}) for b in profile.blocks}
    return of_actions(name, actions, lossy)


def of_actions(name: str, actions: Actions, lossy: bool = False) -> Baseline:
    return Baseline(name, jaxmem.remat_policy(Draft(actions)), actions, lossy=lossy)


def keep_set(profile: Profile, tags: tuple[str, ...], choice: Choice = KEEP) -> Actions:
    """`choice` for `tags`, where the model has them; all else is recomputed."""
    return {b.name: {t.name: choice for t in b.tags if t.name in tags} for b in profile.blocks}


def prices(profile: Profile, choice: Choice) -> bool:
    return any(o.choice == choice for b in profile.blocks for t in b.tags for o in t.options)

"""The experiments' named policies (`experiments/running/policies.py`) as actions in the planner's
cost model.

JAX's own policies are run as they are, and priced as the nearest keep-set. Left out: full
recomputation of every k-th layer, since a profile gives all layers of a block one decision;
`experiments.gpu_check` times it.
"""

import dataclasses
from collections.abc import Callable

import jaxmem
from benchmarks.shared.assignments import every, keep_everything, keep_tags
from benchmarks.shared.case import Case
from experiments.models.loops import scanned
from experiments.running.policies import JAX_POLICIES, KEPT, OFFLOADED, own
from experiments.running.policies import naive as naive_codec
from experiments.steps.step import step_over
from jaxmem._core.actions import KEEP, OFFLOAD, Action, Actions, Choice
from jaxmem._core.assignment import Assignment
from jaxmem._core.profile import Profile
from jaxmem._planner.search.compile import StepCompiler

NAIVE = naive_codec(None)
WITH_NAIVE = {  # the codecs to profile with, by kind
    kind: [own(kind), NAIVE] for kind in jaxmem.codecs.KINDS if kind not in ("mask", "exact")
}
DOTS = ("qkv", "mid", "up")  # products without batch dimensions that the backward needs


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
    """The baselines that `profile` prices: those that offload, or use naive INT4, only if it was
    made with them.
    """
    found = {
        "keep_everything": keep_everything(profile),
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


def compiler_of(case: Case, baseline: Baseline) -> StepCompiler:
    """Compiles a baseline's step: under the policy itself where no actions are exactly it."""
    own = lambda _: step_over(case.config, scanned(baseline.policy))
    return StepCompiler(case.build if baseline.exact else own, case.args, case.backend)


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

"""A config's training step as the planner gets it, its profile, and the step compiled under a
policy.
"""

import functools
import time
from collections.abc import Sequence

import jax

from experiments.command.load import load
from experiments.config.images import ImageConfig
from experiments.config.text import Config
from experiments.models.loops import scanned
from experiments.steps.step import abstract, make_step, step_over
from jaxmem._core.actions import ALL, KEEP, REST, Actions
from jaxmem._core.assignment import Assignment
from jaxmem._core.database import Database, Timing
from jaxmem._core.profile import Profile
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import profile
from jaxmem._planner.search.compile import CompiledStep, StepCompiler
from jaxmem._target.compile.backend import Local
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.devices.support import allowed_actions
from jaxmem._target.devices.target import Target

# A compiled program is remembered whoever traced it.
jax.config.update("jax_traceback_in_locations_limit", 0)

IMAGES = ("model.depth=14", "model.width=8", "train.steps=200", "train.batch=64")


class Case:
    """A config's training step, as `jaxmem.plan` gets it, on a backend."""

    def __init__(self, config: str, backend: Backend, database=None, overrides: Sequence[str] = ()):
        self.config, self.backend, self.database = load(config, overrides), backend, database
        self.build, self.args = functools.partial(make_step, self.config), abstract(self.config)
        self.steps = StepCompiler(self.build, self.args, backend)

    @property
    def target(self) -> Target:
        return self.backend.target

    @functools.cached_property
    def profile(self) -> Profile:
        allowed, _ = allowed_actions(ALL, self.target)
        jaxpr = self.steps.trace(Assignment.nothing()).jaxpr
        return profile(jaxpr, self.backend, Allowed(allowed), database=self.database)

    @property
    def keep_tags(self) -> Actions:
        """Every tag kept, all else recomputed."""
        return {b.name: {t.name: KEEP for t in b.tags} for b in self.profile.blocks}

    @property
    def keep_everything(self) -> Actions:
        """Nothing under a checkpoint."""
        return {b.name: {t.name: KEEP for t in b.tags} | {REST: KEEP} for b in self.profile.blocks}

    def trace(self, actions: Actions | None):
        return self.steps.trace(Assignment.everything() if actions is None else Assignment(actions))

    def compile(self, *many: Actions | None) -> list[CompiledStep]:
        """The step under each, None being everything kept."""
        return self.steps.compile(*(self.keep_everything if a is None else a for a in many))


class AnyTimes(Database):
    """Knows a time for every piece of work, and always the same: for profiles of which only bytes
    and counts are looked at.
    """

    def read_times(self, device: str, source: str, texts: Sequence[str]) -> dict[str, Timing]:
        # as if measured just now: what is old would be measured again, on this machine
        return dict.fromkeys(texts, Timing(1e-5, written=time.time()))


def local() -> Local:
    return Local(Target.parse("local"))


def nano(*overrides: str) -> Config:
    return load("gpt_nano", overrides)


def small_resnet(way, seed: int, *overrides: str) -> ImageConfig:
    """A ResNet of 14 layers on scikit-learn's digits: "Adam" on batches, or AdamA on so many
    microbatches; `overrides` are those of a config.
    """
    how = "none" if way == "Adam" else "adama"
    count = 1 if way == "Adam" else way
    chosen = f"optimizer.accumulation={how}", f"train.microbatches={count}", f"train.seed={seed}"
    return load("resnet50_digits", [*IMAGES, *chosen, *overrides], ImageConfig)


def local_profile(config: Config, codecs=None) -> Profile:
    """The step's profile on this machine, with every action that can be taken here."""
    backend = local()
    steps = StepCompiler(functools.partial(make_step, config), abstract(config), backend)
    actions, _ = allowed_actions(ALL, backend.target)
    jaxpr = steps.trace(Assignment.nothing()).jaxpr
    return profile(jaxpr, backend, Allowed(actions, codecs=codecs))


def compile_step(config: Config, policy):
    """The step with its layers under a policy of `jax.checkpoint`."""
    step = step_over(config, scanned(policy))
    return jax.jit(step, donate_argnums=0).lower(*abstract(config)).compile()


def show(actions: Actions) -> dict[str, dict[str, str]]:
    return {b: {t: str(c) for t, c in tags.items()} for b, tags in actions.items()}

"""A training step as the planner gets it, of a config or of any other `build`: its profile, its
compiles, and what becomes of a budget.
"""

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax

import jaxmem
from benchmarks.shared import assignments
from experiments.command.load import load
from experiments.config.images import ImageConfig
from experiments.config.text import Config
from experiments.models.loops import scanned
from experiments.running.run import Experiment
from experiments.steps.step import abstract, make_step, step_over
from jaxmem._core.actions import ALL, Actions
from jaxmem._core.assignment import Assignment
from jaxmem._core.database import Database, Timing
from jaxmem._core.profile import Profile
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import profile
from jaxmem._planner.search.compile import CompiledStep, StepCompiler
from jaxmem._planner.search.history import History
from jaxmem._target.compile.backend import Deviceless, Local, backend_for
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.devices.support import allowed_actions
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace

# A compiled program is remembered whoever traced it.
jax.config.update("jax_traceback_in_locations_limit", 0)

# A GPT that trains in seconds, under a plan.
SMALL = (
    "model.layers=2", "model.width=32", "model.heads=2", "train.sequence=32", "train.loss_chunk=32",
    "train.batch=4", "plan.budget=90%",
)  # fmt: skip
IMAGES = ("model.depth=14", "model.width=8", "train.steps=200", "train.batch=64")


class Step:
    """A training step, as `jaxmem.plan` gets it, on a backend.

    allowed, codecs: what its profile prices; the first are left out where the target cannot carry
      them out.
    """

    def __init__(
        self,
        build,
        args: tuple,
        backend: Backend,
        database: Database | None = None,
        allowed: Sequence = ALL,
        codecs=None,
    ):
        self.build, self.args, self.backend, self.database = build, args, backend, database
        self.allowed, self.codecs = allowed_actions(allowed, backend.target)[0], codecs
        self._unread = StepCompiler(build, args, backend)

    @property
    def target(self) -> Target:
        return self.backend.target

    @functools.cached_property
    def profile(self) -> Profile:
        jaxpr = self._unread.trace(Assignment.nothing()).jaxpr
        allowed = Allowed(self.allowed, codecs=self.codecs)
        return profile(jaxpr, self.backend, allowed, database=self.database)

    @functools.cached_property
    def compiler(self) -> StepCompiler:
        """Compiles the step under actions for the blocks of its profile."""
        return self._unread.with_facts(True, self.profile.idle_blocks)

    def trace(self, actions: Actions | None):
        return self._unread.trace(
            Assignment.everything() if actions is None else Assignment(actions)
        )

    def compile_buffers(self, *many: Actions | None) -> list[CompiledStep]:
        """The step under each, None being everything kept."""
        everything = assignments.keep_everything(self.profile)
        return self.compiler.compile_buffers(*(everything if a is None else a for a in many))

    def compile_fully(self, actions: Actions | None):
        """The future of a complete compile of the step as it is written under `actions`; None is no
        plan.
        """
        under = None if actions is None else Assignment(actions)
        return self.backend.compile_fully(*trace(self.build, under, self.args))

    def plan(self, budget: int | None, **given) -> jaxmem.Plan:
        return jaxmem.plan(self.build, *self.args, budget=budget, target=self.target, **given)

    def attempt(self, budget: int, **given) -> tuple[jaxmem.Plan | None, dict[str, Any]]:
        """The plan for a budget, and a row of what is told of any plan. For a budget that is
        refused: None, and a row with the least bytes that the search found.
        """
        try:
            plan = self.plan(budget, **given)
        except jaxmem.errors.BudgetError as error:
            return None, {"budget": budget, "found": False, "least": error.least_bytes}
        return plan, {
            "budget": budget,
            "found": True,
            "compiles": plan.compiles,
            "within": plan.compiled_bytes <= budget,
            "share_of_budget": plan.compiled_bytes / budget,
            "compiled_bytes": plan.compiled_bytes,
            "prediction_error": abs(plan.predicted_bytes / plan.compiled_bytes - 1),
            "host_bytes": plan.host_bytes,
            "predicted_seconds": plan.predicted_seconds,
            "solve_seconds": plan.solve_seconds,
            "actions": assignments.show(plan.actions),
        }

    def row(self, budget: int, **given) -> dict[str, Any]:
        """The row of `attempt`."""
        return self.attempt(budget, **given)[1]

    def budget_for(self, nbytes: int) -> int:
        """The budget whose usable bytes are so many: the target's margin is added."""
        margin = self.backend.margin
        return int(nbytes / (1 - margin)) + 1 if margin else nbytes

    def least(self, arguments: int, **given) -> int:
        """The least bytes that a search compiles, as the refusal of a budget names them. The budget
        is the bytes of the arguments and hardly more: less is refused without a compile.
        """
        budget = 1 + int(arguments / (1 - self.backend.margin))
        refused = self.row(budget, **given)
        assert not refused["found"], "the arguments' bytes were enough for the step"
        return refused["least"]


class Case(Step):
    """A config's training step."""

    def __init__(
        self, config: str | Config, backend: Backend, database=None, overrides=(), **allowed
    ):
        self.config = load(config, overrides) if isinstance(config, str) else config
        build, args = functools.partial(make_step, self.config), abstract(self.config)
        super().__init__(build, args, backend, database, **allowed)


class AnyTimes(Database):
    """Knows a time for every piece of work, and always the same: for profiles of which only bytes
    and counts are looked at.
    """

    def read_times(self, device: str, source: str, texts: Sequence[str]) -> dict[str, Timing]:
        # as if measured just now: what is old would be measured again, on this machine
        return dict.fromkeys(texts, Timing(1e-5, written=time.time()))


def random_bits_for(target: str) -> None:
    """Sets JAX's default random bits: rbg's for a TPU, threefry's otherwise. For dropout by
    threefry, XLA:TPU writes dozens of arrays as large as the mask.
    """
    implementation = "rbg" if Target.parse(target).platform == "tpu" else "threefry2x32"
    jax.config.update("jax_default_prng_impl", implementation)


def on(target: str, database: Database | None = None) -> Local | Deviceless:
    """The backend of a target."""
    return backend_for(Target.parse(target), database)


@contextlib.contextmanager
def case_on(target: str, config: str, *overrides: str, database=None, **allowed) -> Iterator[Case]:
    """A config's step on a target, whose compilers run while the statement does."""
    with on(target) as backend:
        yield Case(config, backend, database, overrides, **allowed)


def between(least: int, most: int, count: int) -> dict[str, int]:
    """`count` budgets that divide a range evenly, its ends left out, by their share of it."""
    return {
        f"{i}/{count + 1}": least + (most - least) * i // (count + 1) for i in range(1, count + 1)
    }


def from_to(low: int, high: int, count: int) -> list[int]:
    """`count` budgets that divide a range evenly, its ends among them."""
    return [low + (high - low) * i // (count - 1) for i in range(count)]


def of_rows(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What the rows of `Step.attempt` come to."""
    rows = list(rows)
    found = [row for row in rows if row["found"]]
    of = lambda key: [row[key] for row in found]
    return {
        "budgets": len(rows),
        "found": len(found),
        "within": sum(row["compiled_bytes"] <= row["budget"] for row in found),
        "most compiles": max(of("compiles")),
        "median compiles": statistics.median(of("compiles")),
        "median share of budget": statistics.median(of("share_of_budget")),
        "median prediction error": statistics.median(of("prediction_error")),
        "largest prediction error": max(of("prediction_error")),
    }


@contextlib.contextmanager
def forgetting(cold: bool = True) -> Iterator[None]:
    """While the statement runs, searches recall no earlier compile, unless `cold` is false."""
    kept = mock.patch.object(History, "recall", return_value=[])
    with kept if cold else contextlib.nullcontext():
        yield


def printed(program: str, *arguments: str, **environment: str) -> Any:
    """The JSON in the last line that a Python program prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


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


def trained(experiment: Experiment, config, data, step) -> tuple[Any, list[dict]]:
    """The state after a config's training by `step`, and the metrics of each step."""
    state, metrics = experiment.first_state(config, None), []
    for number in range(1, config.train.steps + 1):
        state, found = step(state, experiment.batch(config, data, number))
        metrics.append(found)
    return state, metrics


def local_profile(config: Config, codecs=None) -> Profile:
    """The step's profile on this machine, with every action that can be taken here."""
    return Case(config, on("local"), codecs=codecs).profile


def compile_step(config: Config, policy):
    """The step with its layers under a policy of `jax.checkpoint`."""
    return _compiled(config, step_over(config, scanned(policy)))


def compile_planned(config: Config, actions: Actions | None):
    """The step under a plan; None is no plan."""
    plan = None if actions is None else Assignment(actions)
    return _compiled(config, make_step(config, plan))


def _compiled(config: Config, step):
    return jax.jit(step, donate_argnums=0).lower(*abstract(config)).compile()

"""A training step as the planner gets it, of a config or of any other `build`: its profile, its
compiles, and what becomes of a budget.
"""

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import jaxmem
from benchmarks.shared import assignments
from experiments.command.load import load
from experiments.config.text import Config
from experiments.running.run import Experiment
from experiments.steps.step import abstract, make_step
from jaxmem._core.actions import Actions
from jaxmem._core.database import Database, Timing
from jaxmem._core.profile import Profile
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import profile
from jaxmem._planner.search.compile import CompiledStep, StepCompiler
from jaxmem._target.compile.backend import Deviceless, Local, backend_for
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.devices.support import allowed_actions
from jaxmem._trace.step import trace
from jaxmem.plans import ALL, Assignment, Target

# A compiled program is remembered whoever traced it.
jax.config.update("jax_traceback_in_locations_limit", 0)
# Settings of a step without released states and their clipping: a released step takes a layer as a
# function, and its clipping is its own.
SCANNED = ("optimizer.accumulation=scan", "optimizer.clip=norm")
ARGUMENTS = 2**20  # bytes beyond the arguments of the step with everything kept


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
        allowed: Sequence = ALL,
        codecs=None,
    ):
        self.build, self.args, self.backend = build, args, backend
        self.allowed, self.codecs = allowed_actions(allowed, backend.target)[0], codecs
        self._unread = StepCompiler(build, args, backend)

    @property
    def target(self) -> Target:
        return self.backend.target

    @functools.cached_property
    def profile(self) -> Profile:
        jaxpr = self._unread.trace(Assignment.nothing()).jaxpr
        allowed = Allowed(self.allowed, codecs=self.codecs)
        return profile(jaxpr, self.backend, allowed, database=self.backend.database)

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
        kept = self.profile.everything_kept
        return self.compiler.compile_buffers(*(kept if a is None else a for a in many))

    def compile_fully(self, plan: Assignment | None):
        """The future of a complete compile of the step under `plan`; None is no plan."""
        return self.backend.compile_fully(*trace(self.build, plan, self.args))

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

    def whole_plan(self) -> jaxmem.Plan:
        """The plan for a budget that everything fits in."""
        return self.plan(10**15)

    def budget_for(self, nbytes: int) -> int:
        """The budget whose usable bytes are so many: the target's margin is added."""
        margin = self.backend.margin
        return int(nbytes / (1 - margin)) + 1 if margin else nbytes

    def least(self, arguments: int, **given) -> int:
        """The least bytes that a search compiles, as the refusal of a budget names them. The budget
        is the bytes of the arguments and hardly more: less is refused without a compile.
        """
        refused = self.row(1 + int(arguments / (1 - self.backend.margin)), **given)
        assert not refused["found"], "the arguments' bytes were enough for the step"
        return refused["least"]

    def ends(self, written: "Step | None" = None, **given) -> dict[str, int]:
        """The least bytes that a search compiles, and the bytes with everything kept: of the same
        step as it is `written` otherwise, if given.
        """
        (whole,) = (written or self).compile_buffers(None)
        least = self.least(whole.compiled.argument_bytes + ARGUMENTS, **given)
        return {"least": least, "everything": whole.total}


class Case(Step):
    """A config's training step."""

    def __init__(self, config: str | Config, backend: Backend, overrides=(), **allowed):
        self.config = load(config, overrides) if isinstance(config, str) else config
        build = functools.partial(make_step, self.config)
        super().__init__(build, abstract(self.config), backend, **allowed)


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
    with on(target, database) as backend:
        yield Case(config, backend, overrides, **allowed)


def nano(*overrides: str) -> Config:
    return load("gpt_nano", overrides)


def plain_loop(layer, parameters, x, key, *shared):
    """A scan over the layers without a checkpoint."""
    count = len(jax.tree.leaves(parameters)[0])

    def turn(x, one):
        parameters, index = one
        own = {} if key is None else {"key": jax.random.fold_in(key, index)}
        return layer(parameters, x, *shared, **own), None

    return jax.lax.scan(turn, x, (parameters, jax.numpy.arange(count, dtype="uint32")))[0]


def trained(experiment: Experiment, config, data, step) -> tuple[Any, list[dict]]:
    """The state after a config's training by `step`, and the metrics of each step."""
    state, metrics = experiment.first_state(config, None), []
    for number in range(1, config.train.steps + 1):
        state, found = step(state, experiment.batch(config, data, number))
        metrics.append(found)
    return state, metrics

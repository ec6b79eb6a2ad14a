"""Steps that parts compile and time: under a named policy, or under the plan of a row."""

import json
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import jaxmem
from experiments.config.text import Config
from experiments.running.planning import named
from experiments.steps.step import abstract, init_state, make_step

REPEATS = 3  # runs of a step in each round, of which the median counts


def under(config: Config, name: str):
    """Compiles the step under a named policy, such as "nothing_saveable" or "every_k=2"."""
    policy, _, k = name.partition("=")
    remat = config.remat.model_copy(update={"policy": policy, "every_k": int(k) if k else None})
    return named(config.model_copy(update={"remat": remat})).step


def plan_row(config: Config, budget: int, actions: Sequence[str] | None = None) -> dict:
    """Returns the row of a plan for `budget` bytes on this device, with the content of the plan's
    file. `actions`: default is all actions. An infeasible budget is a result too.
    """
    start = time.perf_counter()
    try:
        chosen: Any = {} if actions is None else {"actions": actions}
        plan = jaxmem.plan(
            lambda p: make_step(config, p), *abstract(config), budget=budget, **chosen
        )
    except jaxmem.errors.BudgetError as error:
        return {"budget_bytes": budget, "infeasible": str(error)}
    with tempfile.TemporaryDirectory() as folder:
        plan.save(path := pathlib.Path(folder) / "plan.json")
        written = json.loads(path.read_text(encoding="utf-8"))
    return {
        "budget_bytes": budget,
        "bytes": plan.compiled_bytes,
        "host_bytes": plan.host_bytes,
        "baseline_bytes": plan.baseline_bytes,
        "predicted_bytes": plan.predicted_bytes,
        "predicted_seconds": plan.predicted_seconds,
        "baseline_seconds": plan.baseline_seconds,
        "time_source": plan.time_source,
        "compiles": plan.compiles,
        "planning_seconds": time.perf_counter() - start,
        "stored": {
            t: str(c) for tags in plan.actions.values() for t, c in tags.items() if c.action.stores
        },
        "plan": written,
    }


def planned(config: Config, row: dict):
    """Compiles the step under the plan of a row from `plan_row`."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "plan.json"
        path.write_text(json.dumps(row["plan"]), encoding="utf-8")
        plan = jaxmem.Plan.load(path)
    step = make_step(config, plan)
    return jax.jit(step, donate_argnums=0).lower(*abstract(config)).compile()


def example(config: Config):
    """Returns the first state and random tokens, on the device."""
    state = jax.jit(init_state, static_argnums=0)(config)
    shape = config.train.batch, config.train.sequence + 1
    tokens = np.random.default_rng(0).integers(0, config.model.vocab, shape).astype(np.int32)
    return jax.block_until_ready((state, jax.device_put(tokens)))


class Race:
    """Steps that run in turns. Steps with one kind of state pass one state from run to run."""

    def __init__(
        self,
        config: Config,
        makers: Mapping[str, Callable[[], Any]],
        configs: Mapping[str, Config] | None = None,
    ):
        """Compiles and warms up each step. A step that fails is left out; `failed` has its error.
        `peaks` has the device's peak bytes before and after a step's first run, by name.

        `configs`: the configs of steps with another kind of state than `config`, by name.
        """
        self.configs = {name: (configs or {}).get(name, config) for name in makers}
        self.steps: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self.examples: dict[tuple[str, str], Any] = {}
        self.peaks: dict[str, tuple[int, int]] = {}
        for name, make in makers.items():
            try:
                self.steps[name] = make()
                before = peak_bytes()
                self._run(name)
                self.peaks[name] = before, peak_bytes()
            except jax.errors.JaxRuntimeError as error:
                self.failed[name] = str(error)[:500]
                self.steps.pop(name, None)
                self.examples.pop(self._kind(name), None)  # donated arrays may be deleted

    def round(self, number: int) -> dict[str, float]:
        """Returns the seconds of each step, run in a random order that `number` determines."""
        order = random.Random(number).sample(list(self.steps), len(self.steps))
        return {name: statistics.median(self._run(name) for _ in range(REPEATS)) for name in order}

    def _kind(self, name: str) -> tuple[str, str]:
        of = self.configs[name].optimizer
        return of.accumulation, of.second_moment

    def _run(self, name: str) -> float:
        kind = self._kind(name)
        if kind not in self.examples:
            self.examples[kind] = example(self.configs[name])
        state, tokens = self.examples[kind]
        start = time.perf_counter()
        self.examples[kind] = self.steps[name](state, tokens)[0], tokens
        jax.block_until_ready(self.examples[kind])
        return time.perf_counter() - start


def peak_bytes() -> int:
    """Returns the most bytes that the device's allocator had returned at once; 0 if unknown."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def usable_bytes() -> int:
    return jaxmem.plans.Target.parse("local").usable_bytes

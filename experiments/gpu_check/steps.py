"""Steps that run in turns on the device, and their peaks."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import jaxmem
from experiments.config.text import Config
from experiments.steps.step import init_state

REPEATS = 3  # runs of a step in each round, of which the median counts


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
                self.run(name)
                self.peaks[name] = before, peak_bytes()
            except jax.errors.JaxRuntimeError as error:
                self.failed[name] = str(error)[:500]
                self.steps.pop(name, None)
                self.examples.pop(self._kind(name), None)  # donated arrays may be deleted

    def round(self, number: int) -> dict[str, float]:
        """Returns the seconds of each step, run in a random order that `number` determines."""
        order = random.Random(number).sample(list(self.steps), len(self.steps))
        return {name: statistics.median(self.run(name) for _ in range(REPEATS)) for name in order}

    def _kind(self, name: str) -> tuple[str, str]:
        of = self.configs[name].optimizer
        return of.accumulation, of.second_moment

    def run(self, name: str) -> float:
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

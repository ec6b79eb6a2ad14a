"""Compiled steps timed in turns, so that what else the machine does falls on all of them alike."""

import itertools
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from benchmarks.shared.results import say
from experiments.config.text import Config
from experiments.gpu_check.measure import quartiles
from experiments.running.text import TEXT
from experiments.steps.step import first_state

Seconds = dict[str, list[float]]  # of each step by its name, a round after the other
SHARED = "shared"  # the key of the state of steps without a state of their own


def cache_compiles() -> None:
    """Programs that are compiled again are read back: in this process, or with
    JAX_COMPILATION_CACHE_DIR ever.
    """
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update(
            "jax_compilation_cache_dir", tempfile.mkdtemp(prefix="jaxmem-benchmarks-")
        )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def interleaved(
    config: Config, groups: Sequence[Mapping[str, Callable]], rounds: int
) -> tuple[Seconds, Seconds]:
    """`in_turns` of a config's steps, which share one state, on real text."""
    return in_turns(groups, rounds, {SHARED: first_state(config)}, first_batch(config))


def first_batch(config: Config):
    """The batch of a config's first step: real text."""
    return TEXT.batch(config, TEXT.read(config), 1)


def in_turns(
    groups: Sequence[Mapping[str, Callable]],
    rounds: int,
    states: dict,
    batch,
) -> tuple[Seconds, Seconds]:
    """Seconds of each step in each round, by the clock and of all cores' work, which other programs
    disturb less.

    A round runs every step once: the groups, and in each its steps, shuffled. What is compared
    closely stands in one group, so that it runs within a second or two. Before the first round each
    step runs once.

    states: by the names of the steps. Other steps share the state `SHARED`. A step's state is
      replaced by what the step returns.
    """
    steps = {name: step for group in groups for name, step in group.items()}
    key_of = {name: name if name in states else SHARED for name in steps}
    clock: Seconds = {name: [] for name in steps}
    cores: Seconds = {name: [] for name in steps}
    for name, step in steps.items():
        states[key_of[name]], _ = step(states[key_of[name]], batch)
    for number in range(rounds):
        rng = random.Random(number)
        shuffled = lambda many, rng=rng: rng.sample(list(many), len(many))
        order = map(shuffled, shuffled(groups))
        for name in itertools.chain(*order):
            key = key_of[name]
            jax.block_until_ready(states)
            start, worked = time.perf_counter(), time.process_time()
            states[key], metrics = steps[name](states[key], batch)
            jax.block_until_ready((states[key], metrics))
            clock[name].append(time.perf_counter() - start)
            cores[name].append(time.process_time() - worked)
        say(f"round {number + 1}/{rounds}: {sum(s[-1] for s in clock.values()):.1f} s")
    return clock, cores


def over(seconds: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Quartiles of the ratios within a round."""
    return quartiles([s / b for s, b in zip(seconds, base, strict=True)])


def clock_and_cores(both: tuple[Seconds, Seconds], name: str, base: str) -> dict[str, dict]:
    """Ratios of a step's seconds to another's, by the clock and by all cores' work."""
    return {
        what: over(seconds[name], seconds[base]) for what, seconds in zip(("clock", "cores"), both)
    }

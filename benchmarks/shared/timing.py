"""Compiled steps timed in turns, so that what else the machine does falls on all of them alike."""

import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from benchmarks.shared.results import say
from experiments.config.text import Config
from experiments.data import text as data
from experiments.gpu_check.measure import quartiles
from experiments.steps.step import init_state

Seconds = dict[str, list[float]]  # of each step by its name, a round after the other


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
    config: Config,
    groups: Sequence[Mapping[str, Callable]],
    rounds: int,
    configs: Mapping[str, Config] | None = None,
) -> tuple[Seconds, Seconds]:
    """`in_turns` of a config's steps, from its first state, on real text. `configs`: of steps whose
    state is not that of `config`.
    """
    form = lambda c: (c.optimizer.accumulation, c.optimizer.second_moment)  # of the state
    way = {name: form((configs or {}).get(name, config)) for group in groups for name in group}
    of_way = {form(c): c for c in (config, *(configs or {}).values())}
    states = {w: jax.jit(init_state, static_argnums=0)(of_way[w]) for w in set(way.values())}
    t = config.train
    tokens = data.sample(data.read(None, t.sequence).train, 0, 1, t.batch, t.sequence)
    return in_turns(groups, rounds, states, way, tokens)


def in_turns(
    groups: Sequence[Mapping[str, Callable]], rounds: int, states: dict, of: Mapping, batch
) -> tuple[Seconds, Seconds]:
    """Seconds of each step in each round, by the clock and of all cores' work, which other programs
    disturb less.

    A round runs every step once: the groups, and in each its steps, shuffled. What is compared
    closely stands in one group, so that it runs within a second or two. Before the first round each
    step runs once.

    states, of: the states by a key, and each step's key; a step's state is replaced by what it
      returns.
    """
    steps = {name: step for group in groups for name, step in group.items()}
    clock: Seconds = {name: [] for name in steps}
    cores: Seconds = {name: [] for name in steps}
    for name, step in steps.items():
        states[of[name]], _ = step(states[of[name]], batch)
    for number in range(rounds):
        rng = random.Random(number)
        order = [
            rng.sample(list(group), len(group)) for group in rng.sample(list(groups), len(groups))
        ]
        for name in (name for group in order for name in group):
            jax.block_until_ready(states)
            start, worked = time.perf_counter(), time.process_time()
            states[of[name]], metrics = steps[name](states[of[name]], batch)
            jax.block_until_ready((states[of[name]], metrics))
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

"""What the benchmarks share: gpt_nano's profile, interleaved timing of compiled steps, and the
results' file.
"""

import argparse
import functools
import importlib.metadata
import os
import pathlib
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

import jaxmem
from benchmarks.baselines import NAIVE
from experiments.command.load import load
from experiments.config.text import Config
from experiments.data import text as data
from experiments.models.loops import scanned
from experiments.running.record import write_json
from experiments.steps.step import abstract, init_state, make_step, step_over
from jaxmem._core.actions import ALL
from jaxmem._core.profile import Profile
from jaxmem._device.support import allowed_actions
from jaxmem._device.target import Target
from jaxmem._plan.plan import Draft
from jaxmem._planner.compile import Verifier
from jaxmem._profile.profile import profile

WITH_NAIVE = {
    k: [str(jaxmem.codecs.default_for(k)), NAIVE] for k in jaxmem.codecs.KINDS if k != "mask"
}

Seconds = dict[str, list[float]]


def options(name: str, **defaults: int) -> argparse.Namespace:
    """`--out`, and a whole-number option for each of `defaults`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path(__file__).parent / "results" / f"{name}.json",
    )
    for option, default in defaults.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    return parser.parse_args()


def nano(*overrides: str) -> Config:
    return load("gpt_nano", overrides)


def local_profile(config: Config, codecs=None) -> Profile:
    """The step's profile on this machine, with every action that can be taken here."""
    target = Target.parse("local")
    verifier = Verifier(functools.partial(make_step, config), abstract(config), target)
    actions, _ = allowed_actions(ALL, target)
    return profile(verifier.trace(Draft()).jaxpr, target, actions=actions, codecs=codecs)


def compile_step(config: Config, policy):
    return (
        jax.jit(step_over(config, scanned(policy)), donate_argnums=0)
        .lower(*abstract(config))
        .compile()
    )


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
    """Seconds of each step in each round, by the clock and of all cores' work, which other programs
    disturb less.

    A round runs every step once: the groups, and in each its steps, shuffled. What is compared
    closely stands in one group, so that it runs within a second or two. `configs`: of steps whose
    state is not that of `config`.
    """
    way = {
        name: (configs or {}).get(name, config).optimizer.accumulation
        for group in groups
        for name in group
    }
    of_way = {c.optimizer.accumulation: c for c in (config, *(configs or {}).values())}
    states = {w: jax.jit(init_state, static_argnums=0)(of_way[w]) for w in set(way.values())}
    tokens = data.sample(
        data.read(None, config.train.sequence).train,
        0,
        1,
        config.train.batch,
        config.train.sequence,
    )
    steps = {name: step for group in groups for name, step in group.items()}
    clock: Seconds = {name: [] for name in steps}
    cores: Seconds = {name: [] for name in steps}
    for name, step in steps.items():
        states[way[name]], _ = step(states[way[name]], tokens)
    for number in range(rounds):
        rng = random.Random(number)
        order = [
            rng.sample(list(group), len(group)) for group in rng.sample(list(groups), len(groups))
        ]
        for name in (name for group in order for name in group):
            jax.block_until_ready(states)
            start, worked = time.perf_counter(), time.process_time()
            states[way[name]], metrics = steps[name](states[way[name]], tokens)
            jax.block_until_ready((states, metrics))
            clock[name].append(time.perf_counter() - start)
            cores[name].append(time.process_time() - worked)
        say(f"round {number + 1}/{rounds}: {sum(s[-1] for s in clock.values()):.1f} s")
    return clock, cores


def quartiles(values: Sequence[float]) -> dict[str, float]:
    low, median, high = np.percentile(np.asarray(values), [25, 50, 75])
    return {"median": float(median), "lower_quartile": float(low), "upper_quartile": float(high)}


def about() -> dict:
    """The command, and on what it ran."""
    versions = {
        name: importlib.metadata.version(name)
        for name in ("jax", "jaxlib", "flax", "optax", "numpy", "pulp")
    }
    return {
        "command": f"python -m {__package__}.{pathlib.Path(sys.argv[0]).stem}"
        f" {' '.join(sys.argv[1:])}".strip(),
        "versions": {"python": platform.python_version()} | versions,
        "device": f"{jax.devices()[0].device_kind}, {len(os.sched_getaffinity(0))} cores",
    }


def write(out: pathlib.Path, results: dict) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, about() | results)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

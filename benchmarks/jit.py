"""What `jaxmem.jit` costs in the place of `jax.jit`: time of a call, and of a process's first step.

    python -m benchmarks.jit

`jit_calls`: seconds of a call, in turns with `jax.jit`, of a step with so many arrays in its state.
The arrays are small, so that the call itself is most of the time. `more` is the difference of the
least times, in microseconds.

`jit_first_steps`: seconds from the first call of a GPT (of the config gpt_nano, without its tags)
to its first result, each in a process of its own: under `jax.jit`, under `jaxmem.jit` with nothing
stored, and under `jaxmem.jit` after another process planned the step. The budget is half of the
bytes that the step takes under `jax.jit`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks.foreign import OVERRIDES, untagged
from benchmarks.shared.results import Benchmark, Report, measure
from experiments.command.load import load
from experiments.steps.step import abstract

ARRAYS = (4, 50, 200)
CALLS, ROUNDS = 50, 15
WAYS = ("jax.jit", "jaxmem.jit, nothing stored", "jaxmem.jit, a stored plan")


def loss(weights, x):
    for w in weights:
        x = x + jnp.tanh(x @ w) @ w
    return (x**2).mean()


def step(weights, x):
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients), value


def calls(arrays: int) -> dict:
    ways = {
        "jax.jit": jax.jit(step, donate_argnums=0),
        "jaxmem.jit": jaxmem.jit(step, donate_argnums=0),
    }
    x = jnp.ones((2, 8))
    states = {way: [jnp.full((8, 8), 0.01) for _ in range(arrays)] for way in ways}
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for way, function in ways.items():
            weights, _ = function(states[way], x)
            start = time.perf_counter()
            for _ in range(CALLS):
                weights, value = function(weights, x)
            jax.block_until_ready(value)
            least[way] = min(least[way], (time.perf_counter() - start) / CALLS)
            states[way] = weights
    more = 1e6 * (least["jaxmem.jit"] - least["jax.jit"])
    return least | {"ratio": least["jaxmem.jit"] / least["jax.jit"], "more": more}


def gpt() -> tuple:
    config = load("gpt_nano", OVERRIDES)
    return untagged(config), abstract(config)


def unplanned() -> int:
    function, args = gpt()
    found = jax.jit(function, donate_argnums=0).lower(*args).compile().memory_analysis()
    assert found is not None
    whole = found.temp_size_in_bytes + found.argument_size_in_bytes + found.output_size_in_bytes
    return whole - found.alias_size_in_bytes


def first_step(budget: int | None) -> None:
    """Prints the seconds of a first call in this process; None calls `jax.jit`."""
    function, args = gpt()
    made = jax.jit if budget is None else lambda f, **k: jaxmem.jit(f, budget, **k)
    arrays = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), args)
    start = time.perf_counter()
    jax.block_until_ready(made(function, donate_argnums=0)(*arrays))
    print(json.dumps(time.perf_counter() - start))


def first_steps(report: Report) -> None:
    budget = report.once("budget", lambda: unplanned() // 2)
    with tempfile.TemporaryDirectory() as cache:
        for way in WAYS:
            given = None if way == "jax.jit" else budget
            program = f"from benchmarks.jit import first_step; first_step({given})"
            found = lambda program=program: json.loads(
                subprocess.run(
                    [sys.executable, "-c", program],
                    env=os.environ | {"XDG_CACHE_HOME": cache},
                    stdout=subprocess.PIPE,
                    check=True,
                    encoding="utf-8",
                ).stdout
            )
            report.once(way, found)


def summary_of_calls(report: Report) -> dict:
    return {"most microseconds more": max(row["more"] for row in report.results.values())}


def summary_of_first_steps(report: Report) -> dict:
    return {way: report[way] / report["jax.jit"] for way in WAYS}


RESULTS = {
    "jit_calls": Benchmark(ARRAYS, row=calls, summary=summary_of_calls),
    "jit_first_steps": Benchmark(run=first_steps, summary=summary_of_first_steps),
}

if __name__ == "__main__":
    measure("jit", RESULTS)

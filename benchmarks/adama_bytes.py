"""Gradient bytes of one optimizer step, by how its microbatches are gathered: compiled, deviceless,
for an H200.

    python -m benchmarks.adama_bytes

gpt_345m, batch 8 in 8 microbatches, layers recomputed: optax.MultiSteps, gradients added up in a
scan over microbatches, the same with each layer's added in the backward, AdamA on whole gradients,
AdamA released. Gradient bytes are temp less temp of the same microbatches differentiated by the
embedded input alone, whatever the optimizer. MultiSteps holds its sum among its arguments, and the
row ratio 8 bytes a row, which are told apart. Layers keep nothing, so that both hold the same
activations. The bound of released gradients is the largest component (the tied embedding), two
layers, and 2 % of the parameters.
"""

import math

import jax
import jax.numpy as jnp

from benchmarks.shared.released import nbytes
from benchmarks.shared.results import Report
from benchmarks.shared.steps import compiled
from experiments.command.load import load
from experiments.config.text import Config
from experiments.models import registry as models
from experiments.models.loops import stacked
from experiments.steps.accumulate import microbatches
from experiments.steps.step import abstract, make_step
from jaxmem._core.assignment import Assignment
from jaxmem._target.deviceless.compiler import Compiler

CONFIG, TARGET = "gpt_345m", "h200"
INPUT = "by the input alone"
WAYS = {
    "optax.MultiSteps": "multi_steps",
    "accumulation in a scan": "scan",
    "accumulation in place, layer by layer": "in_place",
    "AdamA, whole gradients": "adama",
    "AdamA, released": "released",
    "AdamA, released, row ratio": "released",
}
PLAN = Assignment({"block": {}})


def config_of(way: str) -> Config:
    overrides = [
        "train.microbatches=8",
        "model.loop=stack",
        "optimizer.clip=value",
        f"optimizer.accumulation={WAYS.get(way, way)}",
        f"optimizer.second_moment={'row' if 'row' in way else 'squares'}",
    ]
    return load(CONFIG, overrides)


def by_input(config: Config):
    """step(state, batch): the same forward and backward, without a parameter's gradient."""
    split, loop = models.split(config), stacked(PLAN)

    def step(state, batch):
        outer = {k: v for k, v in state.params.items() if k != "blocks"}

        def loss(x, part, key):
            return split.head(outer, loop(split.layer, state.params["blocks"], x, key), part)

        def one(total, indexed):
            index, part = indexed
            key = jax.random.fold_in(jax.random.wrap_key_data(state.key), index)
            value, d_x = jax.value_and_grad(loss)(split.embed(outer, part), part, key)
            return total + value + d_x.astype(jnp.float32).sum(), None

        return jax.lax.scan(one, jnp.zeros(()), microbatches(batch, config.train.microbatches))[0]

    return step


def measured(compiler: Compiler, step, args, donate: bool) -> dict[str, int]:
    found = compiled(compiler, jax.jit(step, donate_argnums=0 if donate else ()).trace(*args))
    names = ("temp_bytes", "argument_bytes", "total_bytes")
    return {name: getattr(found, name) for name in names}


def run(report: Report, compiler: Compiler, way: str) -> None:
    config = config_of("scan" if way == INPUT else way)
    step = by_input(config) if way == INPUT else make_step(config, PLAN)
    report.once(way, measured, compiler, step, abstract(config), donate=way != INPUT)


def bound(config: Config) -> dict[str, int]:
    params = abstract(config)[0].params
    layer = nbytes(params["blocks"]) // config.model.layers
    outer = {k: nbytes(v) for k, v in params.items() if k != "blocks"}
    found = {"parameters": nbytes(params), "layer": layer, "largest": max(layer, *outer.values())}
    return found | {"bound": found["largest"] + 2 * layer + found["parameters"] // 50}


def rows_of(config: Config) -> int:
    """How many rows have a ratio: one for each index of a matrix's axes but its last; of a vector
    one, in each layer.
    """
    params = abstract(config)[0].params
    return sum(math.prod(a.shape[:-1]) for a in jax.tree.leaves(params))


def summary(report: Report) -> dict:
    rows, config = report.results, config_of("scan")
    limits = bound(config)
    gradients = {way: rows[way]["temp_bytes"] - rows[INPUT]["temp_bytes"] for way in WAYS}
    released = rows["AdamA, released"]["argument_bytes"]
    held = {way: rows[way]["argument_bytes"] - released for way in WAYS}
    return {
        "gradient bytes": gradients,
        "and among MultiSteps' arguments": held["optax.MultiSteps"],
        "and among the row ratio's": held["AdamA, released, row ratio"],
        "rows": rows_of(config),
        **limits,
        "within": gradients["AdamA, released"] <= limits["bound"],
    }


def main() -> None:
    with Compiler(TARGET, workers=2) as compiler:
        cases = [(compiler, way) for way in (INPUT, *WAYS)]
        Report("adama_bytes").for_each(cases, run, summary)


if __name__ == "__main__":
    main()

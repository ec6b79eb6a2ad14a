"""BERT-Large, 8 sequences of 128: device bytes of Adam, Adafactor, SM3 and AdamA (AdamA, Table 2;
M10).

    python -m benchmarks.adama_table2

One H200, compiled deviceless; states in float32, computed in bfloat16, everything kept. AdamA takes
the 8 sequences as 8 microbatches; the others, which cannot without a buffer for the gradient, take
them at once. The paper, in GB on one GPU: Adam 6.15, Adafactor 4.83, SM3 4.90, AdamA 4.18.
"""

import functools
from typing import Any

import jax
import optax

from benchmarks.shared.results import Report
from benchmarks.shared.steps import compiled
from experiments.command.load import load
from experiments.config.text import Config
from experiments.models.loops import stacked
from experiments.steps.step import State, abstract, make_loss, make_step
from jaxmem._target.deviceless.compiler import Compiler

OPTIMIZERS = {
    "Adam": optax.adam(1e-4),
    "Adafactor": optax.adafactor(1e-4),
    "Adafactor, with momentum": optax.adafactor(1e-4, momentum=0.9),
    "SM3": optax.sm3(1e-4),
}


def config_of(*overrides: str) -> Config:
    return load("bert_large", ["train.batch=8", "optimizer.clip=none", *overrides])


def plain(config: Config, tx: optax.GradientTransformation):
    """step(state, batch) on the whole batch's gradient, and the state's shapes."""
    loss = make_loss(config, stacked())

    def step(state: State, batch):
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        value, grads = jax.value_and_grad(loss)(state.params, batch, key)
        updates, moments = tx.update(grads, state.moments, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return State(params, moments, state.step + 1, state.key), value

    state, batch = abstract(config)
    return step, (
        State(state.params, jax.eval_shape(tx.init, state.params), state.step, state.key),
        batch,
    )


def case(name: str) -> tuple:
    """A step, and the shapes of its arguments."""
    if name in OPTIMIZERS:
        one = config_of("train.microbatches=1", "optimizer.accumulation=scan")
        return plain(one, OPTIMIZERS[name])
    config = config_of(f"train.microbatches={name.removeprefix('AdamA, N=')}")
    return make_step(config), abstract(config)


def row(compiler: Compiler, name: str) -> dict[str, int]:
    step, arguments = case(name)
    found = compiled(compiler, jax.jit(step, donate_argnums=0).trace(*arguments))
    return {"bytes": found.total_bytes, "temp_bytes": found.temp_bytes}


def summary(report: Report) -> dict:
    rows = {name: row["bytes"] for name, row in report.results.items()}
    best = min(rows[name] for name in OPTIMIZERS)
    return {"bytes": rows, "AdamA, N=8, over the least of the others": rows["AdamA, N=8"] / best}


def main() -> None:
    names = [*OPTIMIZERS, *(f"AdamA, N={n}" for n in (1, 2, 4, 8))]
    with Compiler("h200", workers=1) as compiler:
        Report("adama_table2").rows(names, functools.partial(row, compiler), summary)


if __name__ == "__main__":
    main()

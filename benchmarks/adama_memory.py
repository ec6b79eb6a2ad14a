"""Device bytes of AdamA against other ways to sum gradients and against other optimizers. Every
step is compiled without hardware, and no step runs.

    python -m benchmarks.adama_memory [RESULT ...]

`adama_bytes`: gradient bytes of gpt_345m's step on an H200, batch 8 in 8 microbatches, by how the
microbatches become one step: optax.MultiSteps, gradients added in a scan over microbatches, each
layer's gradients added in the backward, AdamA on whole gradients, AdamA released. Gradient bytes
are the step's temporary bytes minus the temporary bytes of a step that differentiates the same
microbatches by the embedded input alone. MultiSteps holds its sum among its arguments, and the row
ratio holds 8 bytes a row there; the summary lists both. Layers keep nothing, so that all steps hold
the same activations.

`adama_bert_4b`: BERT-4B, minibatch 64 in 8 microbatches, AdamA against accumulation in place
(AdamA, Fig. 6; M11), on one H200, and on eight with divided moments (ZeRO-1). Parameters, moments
and gradient sums are float32, computation is bfloat16. AdamA can save at most the gradient sum, 4
bytes a parameter. The paper saves 23.2 % on one device; on eight, 20.1 GB against divided moments
alone, 7.6 GB against divided moments and gradients.

`adama_table2`: BERT-Large, 8 sequences of 128, on an H200: Adam, Adafactor, SM3 and AdamA (AdamA,
Table 2; M10). States are float32, computation is bfloat16, everything is kept. AdamA takes the 8
sequences as 8 microbatches; the others would need a gradient buffer, and take them at once. The
paper, in GB on one GPU: Adam 6.15, Adafactor 4.83, SM3 4.90, AdamA 4.18.

`adama_largest`: the largest BERT that eight devices train, minibatch 256 in 8 microbatches, AdamA
against accumulation (AdamA, Table 3; M12), for eight H200s capped to 16, 32 and 80 GB (no compiler
here supports a V100 any more). Depth and width are interpolated in GPT-3's table; sequence 128; all
layers are recomputed. "whole": float32 states on every device, 12 bytes a parameter and 4 more for
the gradient's sum. "states divided": float32 parameters and moments divided over the devices, with
a bfloat16 copy of the parameters on each, 3.5 bytes a parameter and 4 more for the sum. The bound
is the cap divided by these bytes; `of the bound` is the largest model found over the bound. Sizes
are found by compiling; widths are multiples of 16, so that a model is 1 to 2 % larger than the
next.
"""

import bisect
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.shared.devices import PLAN, accumulation, adama, compiled, compiled_on, count
from benchmarks.shared.results import Benchmark, Report, measure
from experiments.command.load import load
from experiments.config.text import Config
from experiments.models import registry as models
from experiments.models.loops import stacked
from experiments.steps.accumulate import microbatches
from experiments.steps.step import State, abstract, make_loss, make_step
from jaxmem._target.compiled.compiled import Compiled

TARGET = "h200"


def sizes(found: Compiled) -> dict[str, int]:
    names = {"bytes": "total_bytes", "temp_bytes": "temp_bytes", "argument_bytes": "argument_bytes"}
    return {key: getattr(found, name) for key, name in names.items()}


def sizes_of(step, arguments: tuple, donated: int | tuple = 0) -> dict[str, int]:
    """Of a step on one device."""
    return sizes(compiled(TARGET, jax.jit(step, donate_argnums=donated).trace(*arguments)))


# -- adama_bytes

INPUT = "by the input alone"
WAYS = {
    "optax.MultiSteps": "multi_steps",
    "accumulation in a scan": "scan",
    "accumulation in place, layer by layer": "in_place",
    "AdamA, whole gradients": "adama",
    "AdamA, released": "released",
    "AdamA, released, row ratio": "released",
    INPUT: "scan",
}


def gradients_config(way: str) -> Config:
    second = "row" if "row" in way else "squares"
    own = f"optimizer.accumulation={WAYS[way]}", f"optimizer.second_moment={second}"
    common = "train.microbatches=8", "model.loop=stack", "optimizer.clip=value"
    return load("gpt_345m", [*common, *own])


def by_input(config: Config):
    """step(state, batch): the same forward and backward, without a parameter's gradient."""
    split, loop = models.split(config), stacked(PLAN)

    def step(state, batch):
        outer = {k: v for k, v in state.params.items() if k != "blocks"}
        after = lambda x, key: loop(split.layer, state.params["blocks"], x, key)
        loss = lambda x, part, key: split.head(outer, after(x, key), part)

        def one(total, indexed):
            index, part = indexed
            key = jax.random.fold_in(jax.random.wrap_key_data(state.key), index)
            value, d_x = jax.value_and_grad(loss)(split.embed(outer, part), part, key)
            return total + value + d_x.astype(jnp.float32).sum(), None

        return jax.lax.scan(one, jnp.zeros(()), microbatches(batch, config.train.microbatches))[0]

    return step


def gradients(way: str) -> dict[str, int]:
    config = gradients_config(way)
    if way == INPUT:
        return sizes_of(by_input(config), abstract(config), donated=())
    return sizes_of(make_step(config, PLAN), abstract(config))


def of_gradients(report: Report) -> dict:
    rows, params = report.results, abstract(gradients_config(INPUT))[0].params
    ways = [way for way in WAYS if way != INPUT]
    found = {way: rows[way]["temp_bytes"] - rows[INPUT]["temp_bytes"] for way in ways}
    released = rows["AdamA, released"]["argument_bytes"]
    held = {way: rows[way]["argument_bytes"] - released for way in ways}
    return {
        "gradient bytes": found,
        "and among MultiSteps' arguments": held["optax.MultiSteps"],
        "and among the row ratio's": held["AdamA, released, row ratio"],
        # A ratio for each index of a matrix's axes but its last; for a vector one, in each layer.
        "rows": sum(math.prod(a.shape[:-1]) for a in jax.tree.leaves(params)),
    }


# -- adama_bert_4b

BERT_4B = load("bert_4b", ["optimizer.clip=none"])
ALSO_GRADIENTS = "moments", None, "divided"
DIVIDED = {  # devices, what makes the step, and its arguments
    "accumulation, 1": (1, accumulation, ("nothing",)),
    "AdamA, 1": (1, adama, ("nothing",)),
    "accumulation, moments divided, 8": (8, accumulation, ("moments",)),
    "accumulation, moments and gradients divided, 8": (8, accumulation, ALSO_GRADIENTS),
    "AdamA, moments divided, 8": (8, adama, ("moments",)),
}
# The steps with accumulation and with AdamA whose difference is the saving.
SAVED = {
    "1": ("accumulation, 1", "AdamA, 1"),
    "8": ("accumulation, moments divided, 8", "AdamA, moments divided, 8"),
    "8, against divided gradients":
        ("accumulation, moments and gradients divided, 8", "AdamA, moments divided, 8"),
}  # fmt: skip


def divided(name: str) -> dict[str, int]:
    devices, make, arguments = DIVIDED[name]
    return sizes(compiled_on(BERT_4B, devices, make(BERT_4B, devices, *arguments)))


def of_divided(report: Report) -> dict:
    size, told = count(BERT_4B), {}
    for name, pair in SAVED.items():
        before, after = (report[key]["bytes"] for key in pair)
        saved = before - after
        own = {"saved bytes": saved, "saved": saved / before, "of the bound": saved / (4 * size)}
        told |= {name: own, f"bound, {name}": 4 * size / before}
    return {"parameters": size} | told


# -- adama_table2

OPTIMIZERS = {
    "Adam": optax.adam(1e-4),
    "Adafactor": optax.adafactor(1e-4),
    "Adafactor, with momentum": optax.adafactor(1e-4, momentum=0.9),
    "SM3": optax.sm3(1e-4),
}


def plain(config: Config, tx: optax.GradientTransformation):
    """step(state, batch) on the whole batch's gradient, and the shapes of its arguments."""
    loss = make_loss(config, stacked())

    def step(state: State, batch):
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        value, grads = jax.value_and_grad(loss)(state.params, batch, key)
        updates, moments = tx.update(grads, state.moments, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return State(params, moments, state.step + 1, state.key), value

    state, batch = abstract(config)
    moments = jax.eval_shape(tx.init, state.params)
    return step, (State(state.params, moments, state.step, state.key), batch)


def optimizer(name: str) -> dict[str, int]:
    tx, n = OPTIMIZERS.get(name), name.removeprefix("AdamA, N=")
    own = ["train.microbatches=1", "optimizer.accumulation=scan"]
    own = [f"train.microbatches={n}"] if tx is None else own
    config = load("bert_large", ["train.batch=8", "optimizer.clip=none", *own])
    return sizes_of(*(plain(config, tx) if tx else (make_step(config), abstract(config))))


def of_optimizers(report: Report) -> dict:
    rows = {name: row["bytes"] for name, row in report.results.items()}
    best = min(rows[name] for name in OPTIMIZERS)
    return {"bytes": rows, "AdamA, N=8, over the least of the others": rows["AdamA, N=8"] / best}


# -- adama_largest

DEVICES = 8
CAPS = {f"{size} GB": size * 10**9 for size in (16, 32, 80)}
LARGEST = {  # what makes the step, its arguments, and bytes of a parameter
    "accumulation, whole": (accumulation, ("nothing",), 16.0),
    "AdamA, whole": (adama, ("nothing",), 12.0),
    "accumulation, states divided": (accumulation, ("states", "bfloat16"), 7.5),
    "AdamA, states divided": (adama, ("states", "bfloat16"), 3.5),
}
GPT3 = ((125e6, 12, 768), (350e6, 24, 1024), (760e6, 24, 1536), (1.3e9, 24, 2048),
        (2.7e9, 32, 2560), (6.7e9, 32, 4096),
        (13e9, 40, 5120), (175e9, 96, 12288))  # fmt: skip
HEADS, VOCAB, STEP = 16, 30522, 16  # STEP: of the widths between the table's rows


def sized(parameters: float) -> Config:
    """A BERT of about so many parameters: depth by GPT-3's table, and the width that gives them."""
    known, depths, _ = np.log(np.transpose(GPT3))
    layers = round(math.exp(np.interp(math.log(parameters), known, depths)))
    count_of = lambda width: 12 * layers * width**2 + VOCAB * width
    width = max(w for w in range(256, 16384, STEP) if count_of(w) <= parameters)
    shape = f"model.layers={layers}", f"model.width={width}", f"model.heads={HEADS}"
    return load("bert_4b", ["train.batch=256", "optimizer.clip=none", *shape])


def largest(way: str, memory: str) -> dict:
    """By bisection among sizes that differ by half a percent of the bound."""
    make, arguments, each = LARGEST[way]
    cap, tried = CAPS[memory], {}
    bound = cap / each

    def is_over(parameters: float) -> bool:
        config = sized(parameters)
        total = compiled_on(config, DEVICES, make(config, DEVICES, *arguments)).total_bytes
        shape = {"layers": config.model.layers, "width": config.model.width}
        tried[count(config)] = {"bytes": total} | shape
        return total > cap

    bisect.bisect([bound * share / 200 for share in range(100, 201)], False, key=is_over)
    size = max((size for size, row in tried.items() if row["bytes"] <= cap), default=None)
    found = {"parameters": size, "tried": tried}
    return found if size is None else found | {"of the bound": size / bound} | tried[size]


def of_largest(report: Report) -> dict:
    return {
        key: {"billion": row["parameters"] / 1e9, "of the bound": row["of the bound"]}
        for key, row in report.results.items()
    }


RESULTS = {
    "adama_bytes": Benchmark(WAYS, row=gradients, summary=of_gradients),
    "adama_bert_4b": Benchmark(DIVIDED, row=divided, summary=of_divided),
    "adama_table2": Benchmark(
        [*OPTIMIZERS, *(f"AdamA, N={n}" for n in (1, 2, 4, 8))],
        row=optimizer,
        summary=of_optimizers,
    ),
    "adama_largest": Benchmark(
        [(way, cap) for cap, way in itertools.product(CAPS, LARGEST)],
        row=largest,
        summary=of_largest,
    ),
}

if __name__ == "__main__":
    measure("adama_memory", RESULTS)

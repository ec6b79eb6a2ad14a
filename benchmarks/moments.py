"""Small states: Adam's moments in 8 bits, and frozen parameters.

    python -m benchmarks.moments [RESULT ...]

`moments_losses`: final losses with moments in 8 bits against moments in float32, of the small GPT,
BERT and ResNet of `adama_convergence`, beta2 0.95 and 0.999, three seeds. With one microbatch the
optimizer is AdamW, and AdamW under `jaxmem.quantized`. With 8 microbatches it is AdamA with the row
ratio, and the same with moments="int8". The spread is the largest final loss minus the smallest,
over the seeds of float32 moments with as many microbatches; a difference is of means.

`moments_update`: one update of AdamW by four arrays of 4 million parameters. On this CPU: the
seconds of an update with `jaxmem.quantized` divided by the seconds of an update with float32
moments, in turns. For an H200, compiled without hardware: temporary bytes, and XLA's estimate of
the seconds.

`largest_moments`: the largest GPT of `largest` (`benchmarks.placed`) for a GPU of 24 GB and a host
of 128 GB, planned jointly, with moments in float32 and in 8 bits, compiled without hardware. The
predicted seconds are of the layers, in a step of the largest model with float32 moments.

`fine_tuning`: full fine-tuning of Llama 2 7B with AdamW, 4 sequences of 2048 in one microbatch:
`released_step(tx, loss)` with the loss as it is (a `jax.lax.scan` over layers, XLA's attention,
bfloat16 compute), planned and compiled without hardware. `48 GB alone` uses no host memory; `24 GB`
has a host of 128 GB, and plans place the states.

`lora_7b`: a Llama of 7 billion parameters with adapters of rank 16 (`benchmarks/shared/lora.py`),
8 sequences of 1024 tokens, trained by AdamW for an H200 within budgets below its memory and 128 GB
of host memory, planned jointly and compiled without hardware. Its frozen base is in bfloat16 or in
8 bits. With the base "full", all parameters are trained in float32, without adapters.
"""

import itertools
import math
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks.adama import BETAS, SEEDS, train
from benchmarks.placed import (
    FEW,
    bytes_of,
    largest,
    limits_of,
    rules_of,
    search_of,
    step_of,
)
from benchmarks.shared import lora
from benchmarks.shared.case import on
from benchmarks.shared.devices import compiled
from benchmarks.shared.results import Benchmark, Report, known, measure
from benchmarks.shared.timing import clock_and_cores, in_turns
from experiments.command.load import load
from experiments.models import registry
from experiments.steps.step import make_loss
from jaxmem._core.actions import ALL
from jaxmem._core.database import Database
from jaxmem._planner.placement.search import PlacementSearch

MODELS = "GPT", "BERT", "ResNet"
NUMBERS = 1, 8
STORED = "float", "int8"
CASES = [
    (model, f"beta2 {beta}", f"N={n}", stored, f"seed {seed}")
    for seed, beta, n, model, stored in itertools.product(SEEDS, BETAS, NUMBERS, MODELS, STORED)
]


def trained(model: str, beta2: str, number: str, stored: str, seed: str) -> float:
    n = int(number.removeprefix("N="))
    how = "Adam" if n == 1 else "row"
    return train(model, beta2, how, n, seed, f"optimizer.moments={stored}")["final"]


def of_losses(report: Report) -> dict:
    found = {}
    for model, beta, n in itertools.product(MODELS, BETAS, NUMBERS):
        name = f"{model}, beta2 {beta}, N={n}"
        finals = {
            stored: [report[f"{name}, {stored}, seed {seed}"] for seed in SEEDS]
            for stored in STORED
        }
        spread = max(finals["float"]) - min(finals["float"])
        difference = statistics.fmean(finals["int8"]) - statistics.fmean(finals["float"])
        found[name] = {"spread": spread, "int8": difference, "within": difference <= spread}
    within = sum(row["within"] for row in found.values())
    return {"within the spread": f"{within} of {len(found)}"} | found


OPTIMIZERS = {
    "float32": lambda: optax.adamw(1e-3),
    "int8": lambda: jaxmem.quantized(optax.adamw(1e-3)),
}
SHAPES = {f"weight {i}": (1024, 4096) for i in range(4)}
ROUNDS = 15


def updates(report: Report) -> None:
    make = lambda value: {k: jnp.full(shape, value) for k, shape in SHAPES.items()}
    steps, states = {}, {}
    for name, optimizer in OPTIMIZERS.items():
        tx = optimizer()

        def step(state, gradient, tx=tx):
            params, moments = state
            changes, moments = tx.update(gradient, moments, params)
            return (optax.apply_updates(params, changes), moments), {}

        states[name] = make(0.5), tx.init(make(0.5))
        jitted = jax.jit(step, donate_argnums=0)
        found = compiled(
            "h200", jitted.trace(*jax.eval_shape(lambda *a: a, states[name], make(0.1)))
        )
        size = sum(a.size for a in states[name][0].values())
        report.add(
            name,
            {
                "state bytes a parameter": sum(a.nbytes for a in jax.tree.leaves(states[name][1]))
                / size,
                "seconds, h200, XLA's estimate": found.xla_seconds,
                "temporary bytes a parameter, h200": found.temp_bytes / size,
            },
        )
        steps[name] = jitted
    seconds = in_turns([steps], ROUNDS, states, make(0.1))
    report.add("int8 to float32, this CPU", clock_and_cores(seconds, "int8", "float32"))


def of_largest(report: Report) -> None:
    """The largest GPT of the smallest GPU and host, and the step time at one size."""
    target, host = "rtx4090", "128 GB"
    with on(target, Database()) as backend:
        limits = limits_of(target, host, backend)
        for moments in STORED:
            few = search_of(step_of(FEW, moments), backend, limits, ALL)
            report.once(moments, largest, few, rules_of(few)["joint"], None, True, moments)
            layers = report["float"]["layers"]
            report.once(f"{moments}, {layers} layers", seconds_of, few, layers, moments)


def seconds_of(few: PlacementSearch, layers: int, moments: str) -> dict[str, Any]:
    """The fastest step of so many layers, compiled, and its predicted seconds."""
    search = search_of(step_of(layers, moments), few.steps.backend, few.limits, ALL)
    best = known(search.run())
    return bytes_of(best) | {"seconds": best.solution.seconds}


def of_sizes(report: Report) -> dict:
    same = f"{report['float']['layers']} layers"
    ratio = lambda name, key, more="": report[f"int8{more}"][key] / report[f"float{more}"][key]
    return {
        "parameters": ratio("int8", "parameters"),
        "seconds at equal size": ratio("int8", "seconds", f", {same}"),
    }


# The name of a case: target, budgets of device and host, whether plans place states.
MEMORIES = {
    "48 GB alone": ("l40s", {"budget": "48GB", "actions": ("recompute",)}),
    "24 GB": (
        "rtx4090",
        {"budget": "24GB", "host_budget": "128GB", "decide": ("actions", "states")},
    ),
}
# The dtype of parameters, and the optimizer.
KINDS = {
    "bfloat16, moments in 8 bits": (jnp.bfloat16, lambda: jaxmem.quantized(optax.adamw(1e-5))),
    "float32, moments in float32": (jnp.float32, lambda: optax.adamw(1e-5)),
}
TUNED = [
    ("48 GB alone", "bfloat16, moments in 8 bits"),
    *(("24 GB", kind) for kind in KINDS),
]
LLAMA = ["model.hidden=11008", "model.kv_heads=32", "model.attention=fused", "model.loop=scan"]
LLAMA += ["train.batch=4", "train.microbatches=1", "train.sequence=2048", "optimizer.clip=none"]
LLAMA += ["optimizer.accumulation=scan", "plan.budget=none"]


def fine_tuned(memory: str, kind: str) -> dict[str, Any]:
    """A plan of a step of Llama 2 7B, compiled."""
    config = load("mistral_7b", LLAMA)
    target, options = MEMORIES[memory]
    dtype, optimizer = KINDS[kind]
    loss, tx = make_loss(config), optimizer()
    build = lambda plan: jaxmem.released_step(tx, loss, plan=plan)
    tokens = registry.batch_shape(config)
    cast = lambda a: jax.ShapeDtypeStruct(a.shape, dtype)
    params = jax.eval_shape(lambda: registry.create(config, jax.random.key(0)))
    params = jax.tree.map(cast, params)
    state = jax.eval_shape(build(None).init, params, tokens)
    plan = jaxmem.plan(build, state, tokens, target=target, **options)
    return {
        "parameters": sum(math.prod(a.shape) for a in jax.tree.leaves(params)),
        "states": str(plan.places or "on the device"),
        "compiled": plan.compiled_bytes,
        "host compiled": plan.host_bytes,
        "seconds": plan.predicted_seconds,
    }


FULL = "full"
FITTED = [("bfloat16", 24), ("bfloat16", 12), ("int8", 12), ("int8", 8), (FULL, 24)]  # GB


def fitted(base: str, gigabytes: str) -> dict[str, Any]:
    """The plan of a step within so many gigabytes, and the bytes that it compiles to."""
    build, args = lora.step_of(lora.Llama(base=None if base == FULL else base))
    budget = int(float(gigabytes.removesuffix(" GB")) * 1e9)
    decide, host = ("actions", "states"), int(128e9)
    plan = jaxmem.plan(
        build,
        *args,
        budget=budget,
        host_budget=host,
        target="h200",
        decide=decide,
        actions=jaxmem.plans.LOSSLESS,
    )
    params, _ = args[0]
    nbytes = lambda tree: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
    trained = lora.trained_of(params) if base != FULL else params
    assert plan.places is not None
    return {
        "parameters": optax.tree.size(params),
        "trained": optax.tree.size(trained),
        "state bytes": nbytes(args[0]),
        "states": str(plan.places),
        "compiled": plan.compiled_bytes,
        "host compiled": plan.host_bytes,
        "everything kept": plan.baseline_bytes,
        "seconds": plan.predicted_seconds,
    }


RESULTS = {
    "fine_tuning": Benchmark(TUNED, row=fine_tuned),
    "lora_7b": Benchmark([(base, f"{size} GB") for base, size in FITTED], row=fitted),
    "moments_losses": Benchmark(CASES, row=trained, summary=of_losses),
    "moments_update": Benchmark(run=updates),
    "largest_moments": Benchmark(run=of_largest, summary=of_sizes),
}

if __name__ == "__main__":
    measure("moments", RESULTS)

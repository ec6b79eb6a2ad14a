"""Adam's moments in 8 bits: accuracy, time of an update, and the largest model.

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
"""

import itertools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks.adama import BETAS, SEEDS, train
from benchmarks.placed import largest, layers_of, plan_within
from benchmarks.shared.devices import compiled
from benchmarks.shared.results import Benchmark, Report, known, measure
from benchmarks.shared.timing import clock_and_cores, in_turns
from jaxmem._trace.arguments import sized

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
    steps, states, gradient = {}, {}, make(0.1)
    for name, optimizer in OPTIMIZERS.items():
        tx = optimizer()

        def step(state, gradient, tx=tx):
            params, moments = state
            changes, moments = tx.update(gradient, moments, params)
            return (optax.apply_updates(params, changes), moments), {}

        states[name] = make(0.5), tx.init(make(0.5))
        steps[name] = jax.jit(step, donate_argnums=0)
        shapes = jax.eval_shape(lambda *a: a, states[name], gradient)
        found = compiled("h200", steps[name].trace(*shapes))
        size = optax.tree.size(states[name][0])
        held = sum(a.nbytes for a in jax.tree.leaves(states[name][1]))
        row = {
            "state bytes a parameter": held / size,
            "seconds, h200, XLA's estimate": found.xla_seconds,
            "temporary bytes a parameter, h200": found.temp_bytes / size,
        }
        report.add(name, row)
    seconds = in_turns([steps], ROUNDS, states, gradient)
    report.add("int8 to float32, this CPU", clock_and_cores(seconds, "int8", "float32"))


def of_largest(report: Report) -> None:
    """The largest GPT of the smallest GPU and host, and the step time at one size."""
    memory = "rtx4090", "128 GB", "joint"
    for moments in STORED:
        report.once(moments, largest, *memory, moments)
        layers = report["float"]["layers"]
        report.once(f"{moments}, {layers} layers", seconds_of, layers, moments, *memory)


def seconds_of(layers: int, moments: str, gpu: str, host: str, way: str) -> dict[str, Any]:
    """The fastest step of so many layers, compiled, and the predicted seconds of its layers."""
    build, args = layers_of(moments)
    plan = plan_within(gpu, host, way, (build, sized(args, layers)))
    row = {"compiled": plan.compiled_bytes, "host compiled": plan.host_bytes}
    return row | {"seconds": known(plan.lanes).seconds - known(plan.lanes).outside_seconds}


def of_sizes(report: Report) -> dict:
    same = f"{report['float']['layers']} layers"
    ratio = lambda name, key, more="": report[f"int8{more}"][key] / report[f"float{more}"][key]
    return {
        "parameters": ratio("int8", "parameters"),
        "seconds at equal size": ratio("int8", "seconds", f", {same}"),
    }


RESULTS = {
    "moments_losses": Benchmark(CASES, row=trained, summary=of_losses),
    "moments_update": Benchmark(run=updates),
    "largest_moments": Benchmark(run=of_largest, summary=of_sizes),
}

if __name__ == "__main__":
    measure("moments", RESULTS)

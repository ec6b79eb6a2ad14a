"""Do device bytes of a step whose model states stream follow arithmetic?

    python -m benchmarks.streamed_bytes

A GPT of 24 layers (width 2048) and a Llama of 24 (width 2048, SwiGLU of 5504, 4 heads of keys and
values), released, with float32 states, in microbatches of 8 sequences of 1024, compiled for h200.
One point of each model and number of microbatches is compiled first: all states in host memory,
every layer recomputed. From it the bytes of all others are predicted:

- what lies where by the shapes of the state: 12 bytes a parameter of a layer on the device, 2 of
  one with a copy;
- temporaries by how much more or less a walk through the traced step says that they are than a walk
  through the first point's does.

`error` is what is predicted of the whole step on the device against what it compiles to; host bytes
are compared exactly. `beside` is the share of the bytes in loops that cross while a product runs.
"""

import itertools
from typing import Any

import jax

from benchmarks.shared.released import LAYERS, MODELS, config_of, nbytes, state_of, step_of
from benchmarks.shared.results import Report, of_errors
from benchmarks.shared.steps import compiled
from experiments.models import registry
from jaxmem._core.assignment import Assignment
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._target.hlo.transfers import fault
from jaxmem._trace.liveness.walk import temporary_bytes
from tests.shared.audit import audit

ACTIONS = {
    "gpt": {
        "recompute": {},
        "some": {"resid_in": "keep", "qkv": "keep", "mid": "keep"},
        "offload": {"resid_in": "offload", "up": "offload"},
        "keep": {"resid_in": "keep", "qkv": "keep", "attn": "keep", "mid": "keep", "up": "keep"},
    },
    "llama": {
        "recompute": {},
        "some": {"resid_in": "keep", "q": "keep", "k": "keep", "v": "keep", "mid": "keep"},
    },
}
PLACES: list[dict[str, Any]] = [{"persist": p} for p in (0, LAYERS // 2, LAYERS - 1)]
MICROBATCHES = (1, 4)
OTHERS: list[dict[str, Any]] = [  # of the GPT, every layer recomputed
    {"persist": LAYERS},
    {"persist": 0, "copies": LAYERS},
    {"persist": 8, "copies": 8, "buffers": 4},
    {"persist": 0, "outer_moments": "pinned_host"},
]


class Point:
    """A step under one placement, one plan, and so many microbatches of 8 rows."""

    def __init__(self, model: str, microbatches: int, actions: str, where: dict[str, Any]):
        config = config_of(model, microbatches)
        step = step_of(config, Assignment({"block": ACTIONS[model][actions]}))
        args = step.split(state_of(config, step), **where), registry.batch_shape(config)
        self.traced = jax.jit(step, donate_argnums=0).trace(*args)
        self.host = nbytes([a for a in jax.tree.leaves(args) if in_host_memory(a)])
        self.arguments = nbytes(args) - self.host
        donated = range(len(jax.tree.leaves(args[0])))
        self.walked = temporary_bytes(self.traced.jaxpr, donated, on_gpu=True)


def in_host_memory(a) -> bool:
    return a.sharding is not None and a.sharding.memory_kind == "pinned_host"


def share(compiled: Compiled, to_host: bool) -> float | None:
    """Of the bytes that cross in loops one way, the share beside products."""
    crossing = [t for t in compiled.transfers if t.in_loop and t.to_host == to_host]
    total = sum(t.nbytes * t.runs for t in crossing)
    return sum(t.nbytes * t.runs for t in crossing if t.products) / total if total else None


def key_of(model: str, n: int, actions: str, where: dict[str, Any]) -> str:
    placed = ", ".join(f"{k} {v}" for k, v in where.items())
    return f"{model}, {n} microbatches, {actions}, {placed}"


def run(report: Report, compiler: Compiler, *which: Any) -> None:
    """Compiles a point, and predicts it from the first one of its model."""
    if report.has(key := key_of(*which)):
        return
    point = Point(*which)
    found = compiled(compiler, point.traced, 90)
    row = {
        "compiled": found.total_bytes,
        "arguments": point.arguments,
        "walked": point.walked,
        "host compiled": found.host_bytes,
        "host states and activations": point.host + audit(point.traced).host_bytes,
        "fault": fault(found.transfers),
        "fetched beside products": share(found, to_host=False),
        "stored beside products": share(found, to_host=True),
    }
    first = key_of(which[0], which[1], "recompute", PLACES[0])
    if key != first:
        base = report[first]
        row["predicted"] = base["compiled"] + sum(row[k] - base[k] for k in ("arguments", "walked"))
        row["error"] = row["predicted"] / row["compiled"] - 1
    report.add(key, row)


def summary(report: Report) -> dict:
    rows = report.results
    others = {key_of("gpt", 1, "recompute", where) for where in OTHERS}
    predicted = {k: r["error"] for k, r in rows.items() if "error" in r}
    of_keys = lambda keys: {"points": len(keys)} | of_errors(predicted[k] for k in keys)
    of = lambda *which: [k for k in predicted.keys() - others if k.startswith(which)]
    # Of steps that loop over layers in host memory: a stack of one layer is copied as a whole.
    looped = [r for k, r in rows.items() if f"persist {LAYERS - 1}" not in k]
    least = lambda name: min(r[name] for r in looped if r[name] is not None)
    told = [(r["host compiled"], r["host states and activations"]) for r in rows.values()]
    cases = itertools.product(MODELS, MICROBATCHES)
    return {
        "all": of_keys(of(*MODELS)),
        "models": {f"{model}, {n}": of_keys(of(f"{model}, {n} ")) for model, n in cases},
        "other placements": of_keys(others),
        "host bytes exact": sum(got == want for got, want in told),
        "of": len(rows),
        "faults": sum(r["fault"] is not None for r in rows.values()),
        "least fetched beside products": least("fetched beside products"),
        "least stored beside products": least("stored beside products"),
    }


def points() -> list[tuple]:
    found = [
        (model, n, actions, where)
        for model, n in itertools.product(MODELS, MICROBATCHES)
        for actions, where in itertools.product(ACTIONS[model], PLACES)
    ]
    return found + [("gpt", 1, "recompute", where) for where in OTHERS]


def main() -> None:
    with Compiler("h200", workers=2) as compiler:
        cases = [(compiler, *point) for point in points()]
        Report("streamed_bytes").for_each(cases, run, summary)


if __name__ == "__main__":
    main()

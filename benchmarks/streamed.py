"""Released steps whose model states stream from host memory, or are divided over devices, as
compiled for GPUs without hardware. No step runs.

    python -m benchmarks.streamed [RESULT ...]

`streamed_bytes`: do device bytes follow arithmetic? A GPT of 24 layers (width 2048) and a Llama of
24 (width 2048, SwiGLU of 5504, 4 heads of keys and values), with float32 states, in microbatches of
8 sequences of 1024, for h200. One point of each model and number of microbatches is compiled first:
all states in host memory, every layer recomputed. From this point the bytes of all others are
predicted:

- the places of states by the shapes of the state: 12 bytes a parameter of a layer on the device, 2
  of a layer with a copy;
- temporaries by the difference between the liveness estimates of the traced step and of the first
  point's.

`error` is the predicted bytes of the whole step on the device against the compiled bytes; host
bytes are compared exactly. `beside` is the share of the bytes in loops that cross while a product
runs.

`streamed_largest`: models whose states are larger than the device. gpt_10b for rtx4090 (24 GB) and
gpt_20b for h200 within 40 GiB, as `python -m experiments.train` trains them (dropout, clipped by
layer), every layer recomputed. Each is compiled with all layers' states in host memory, and with as
many layers on the device as the first compile's bytes leave room for. `resident` is what states
alone take on a device: 12 bytes a parameter.

`sharded`: which share of a layer's collectives overlaps its products? A GPT and a Llama of 8 layers
(width 2048, two microbatches of 8 sequences of 1024 on each device), all states divided and
gathered a layer at a time, two layers' states on the devices, for eight GPUs. Of the bytes that
loops gather, and scatter, `beside` is the share whose collective runs while a matrix product does,
by the schedule of the compiled step, as plans have XLA schedule it.
"""

import itertools
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from benchmarks.shared.devices import compiled
from benchmarks.shared.released import LAYERS, MODELS, config_of, nbytes, state_of, step_of
from benchmarks.shared.results import Benchmark, Report, measure, of_errors
from experiments.command.load import load
from experiments.models import registry
from jaxmem._core.assignment import Assignment
from jaxmem._target.compile.options import HIDING, options_of
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.hlo.products import flops_of
from jaxmem._target.hlo.text import HloModule, Instruction
from jaxmem._target.hlo.transfers import fault
from jaxmem._trace.liveness.walk import temporary_bytes
from tests.shared.audit import audit

# -- streamed_bytes

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


def share(found: Compiled, to_host: bool) -> float | None:
    """Of the bytes that cross in loops one way, the share beside products."""
    crossing = [t for t in found.transfers if t.in_loop and t.to_host == to_host]
    total = sum(t.nbytes * t.runs for t in crossing)
    return sum(t.nbytes * t.runs for t in crossing if t.products) / total if total else None


def key_of(model: str, n: int, actions: str, where: dict[str, Any]) -> str:
    placed = ", ".join(f"{k} {v}" for k, v in where.items())
    return f"{model}, {n} microbatches, {actions}, {placed}"


def of_point(report: Report, *which: Any) -> None:
    """Compiles a point, and predicts it from the first one of its model."""
    if report.has(key := key_of(*which)):
        return
    point = Point(*which)
    found = compiled("h200", point.traced, 90)
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


def of_points(report: Report) -> dict:
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


# -- streamed_largest

# config -> the GPU, its compute capability, and the bytes of device and host memory to stay within
LARGE: dict[str, tuple[str, int, int, int]] = {
    "gpt_10b": ("rtx4090", 89, 24 * 10**9, 192 * 10**9),
    "gpt_20b": ("h200", 90, 40 * 2**30, 1024 * 10**9),
}
SPARE = 0.02  # of the device, as plans leave for targets that are not there


def large(name: str, step, state, persist: int) -> dict:
    """The step with the states of `persist` layers on the device, compiled."""
    target, capability, most, most_host = LARGE[name]
    config, key = load(name), jax.eval_shape(lambda: jax.random.key(0))
    args = step.split(state, persist), registry.batch_shape(config), key
    traced = jax.jit(step, donate_argnums=0).trace(*args)
    options = options_of("cuda", traced)  # those that experiments compile such a step with
    found = compiled(target, traced, capability, options)
    return {
        "parameters": sum(a.size for a in jax.tree.leaves(state[0])),
        "layers": config.model.layers,
        "persist": persist,
        "resident": nbytes(state),
        "device": found.total_bytes,
        "of": most,
        "host": found.host_bytes,
        "of host": most_host,
        "within": found.total_bytes <= most and found.host_bytes <= most_host,
        "fault": fault(found.transfers),
    }


def of_model(report: Report, name: str) -> None:
    target, _, most, _ = LARGE[name]
    config = load(name)
    step = step_of(config, Assignment({"block": {}}), dtype=None)
    state = params, moments = state_of(config, step)
    layer = nbytes([t["blocks"] for t in (params, moments.mu, moments.nu)]) // config.model.layers
    none, fit = (f"{name}, {target}, {w}" for w in ("none on the device", "as many as fit"))
    least = report.once(none, large, name, step, state, 0)["device"]
    report.once(fit, large, name, step, state, int((most * (1 - SPARE) - least) // layer))


def of_models(report: Report) -> dict:
    rows = report.results
    used = {k: r["device"] / r["of"] for k, r in rows.items() if r["persist"]}
    within = all(r["within"] and r["fault"] is None for r in rows.values())
    return {"within": within, "used of the device": used}


# -- sharded

DEVICES, DIVIDED, PERSIST, PARTS = 8, 8, 2, 2  # layers divided, layers resident, microbatches
TARGETS = {"h200:8": 90, "a100-80gb:8": 80}
KINDS: tuple[str, ...] = ("all-gather", "reduce-scatter")
DONE = re.compile(r"-done\(%?([\w.\-]+)")


def traced(model: str):
    config = config_of(model, PARTS, DEVICES, f"model.layers={DIVIDED}")
    step = step_of(config, Assignment({"block": {}}), axis="data")
    mesh = AbstractMesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    shapes = state_of(config, step)

    def placed(spec, tree):
        to = NamedSharding(mesh, spec)
        shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)
        return jax.tree.map(shape, tree)

    specs = step.specs(shapes[0], DEVICES, "layers")
    is_spec = lambda a: isinstance(a, PartitionSpec)
    state = step.split(jax.tree.map(placed, specs, shapes, is_leaf=is_spec), PERSIST)
    batch = placed(PartitionSpec("data"), registry.batch_shape(config))
    return jax.jit(step.data_parallel(mesh, "layers"), donate_argnums=0).trace(state, batch)


def shares(text: str) -> dict[str, float]:
    """By kind of collective: of the bytes in loops, the share that crosses beside a product."""
    module = HloModule(text)
    crossed: dict[str, int] = dict.fromkeys(KINDS, 0)
    hidden: dict[str, int] = dict.fromkeys(KINDS, 0)

    def kind_of(i: Instruction) -> str | None:
        inner = module.within(i) if "start" in i.opcode else ()
        names = [i.opcode, *(e.opcode for e in inner)]
        return next((k for k in KINDS for name in names if name.startswith(k)), None)

    def walk(name: str, runs: int, looped: bool) -> None:
        body = module.body(name)
        products = [any(flops_of(e) is not None for e in (i, *module.within(i))) for i in body]
        done = {m[1]: at for at, i in enumerate(body) if (m := DONE.search(i.text))}
        for at, i in enumerate(body):
            if i.opcode in ("while", "call", "conditional"):
                for called in i.called:
                    walk(called, runs * i.trips, looped or i.trips > PARTS)
                continue
            kind = kind_of(i)
            if kind is None or not looped or i.opcode.endswith("-done"):
                continue
            nbytes = runs * max(sum(a.nbytes for a in side) for side in (i.operands, i.results))
            crossed[kind] += nbytes
            hidden[kind] += nbytes * any(products[at : done.get(i.name, at)])

    walk(module.entry, 1, False)
    return {kind: hidden[kind] / crossed[kind] for kind in KINDS if crossed[kind]}


def beside(model: str, target: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, HIDING: True}
        compiled(target, traced(model), TARGETS[target], dump)
        (path,) = Path(folder).glob("*_gpu_after_optimizations.txt")
        return {"beside": shares(path.read_text(encoding="utf-8"))}


def of_collectives(report: Report) -> dict:
    found = [row["beside"] for row in report.results.values()]
    names = {"all-gather": "gathered beside products", "reduce-scatter": "scattered"}
    return {f"least {name}": min(f.get(k, 0.0) for f in found) for k, name in names.items()}


RESULTS = {
    "streamed_bytes": Benchmark(points(), of_point, of_points),
    "streamed_largest": Benchmark(LARGE, of_model, of_models),
    "sharded": Benchmark(itertools.product(MODELS, TARGETS), row=beside, summary=of_collectives),
}

if __name__ == "__main__":
    measure("streamed", RESULTS)

"""What of a layer's collectives crosses beside its products, as plans have XLA schedule them?

    python -m benchmarks.sharded

A GPT and a Llama of 8 layers (width 2048, two microbatches of 8 sequences of 1024 on each device),
released, all states divided and gathered a layer at a time, two layers' states on the devices, for
eight GPUs that are not there. Of the bytes that loops gather, and scatter, `beside` is the share
whose collective runs while a matrix product does, by the schedule of the compiled step.
"""

import itertools
import re
import tempfile
from pathlib import Path

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from benchmarks.shared.released import MODELS, config_of, state_of, step_of
from benchmarks.shared.results import Report
from benchmarks.shared.steps import compiled
from experiments.models import registry
from jaxmem._core.assignment import Assignment
from jaxmem._target.compile.options import HIDING
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._target.hlo.products import flops_of
from jaxmem._target.hlo.text import HloModule, Instruction

DEVICES, LAYERS, PERSIST, MICROBATCHES = 8, 8, 2, 2
TARGETS = {"h200:8": 90, "a100-80gb:8": 80}
KINDS: tuple[str, ...] = ("all-gather", "reduce-scatter")
DONE = re.compile(r"-done\(%?([\w.\-]+)")


def traced(model: str):
    config = config_of(model, MICROBATCHES, DEVICES, f"model.layers={LAYERS}")
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
        names = (
            [i.opcode, *(e.opcode for e in module.within(i))] if "start" in i.opcode else [i.opcode]
        )
        return next((k for k in KINDS for name in names if name.startswith(k)), None)

    def walk(name: str, runs: int, looped: bool) -> None:
        body = module.body(name)
        products = [any(flops_of(e) is not None for e in (i, *module.within(i))) for i in body]
        done = {m[1]: at for at, i in enumerate(body) if (m := DONE.search(i.text))}
        for at, i in enumerate(body):
            if i.opcode in ("while", "call", "conditional"):
                for called in i.called:
                    walk(called, runs * i.trips, looped or i.trips > MICROBATCHES)
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
    with tempfile.TemporaryDirectory() as folder, Compiler(target, workers=1) as compiler:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, HIDING: True}
        compiled(compiler, traced(model), TARGETS[target], dump)
        (path,) = Path(folder).glob("*_gpu_after_optimizations.txt")
        return {"beside": shares(path.read_text(encoding="utf-8"))}


def summary(report: Report) -> dict:
    found = [row["beside"] for row in report.results.values()]
    names = {"all-gather": "gathered beside products", "reduce-scatter": "scattered"}
    return {f"least {name}": min(f.get(k, 0.0) for f in found) for k, name in names.items()}


def main() -> None:
    Report("sharded").rows(itertools.product(MODELS, TARGETS), beside, summary)


if __name__ == "__main__":
    main()

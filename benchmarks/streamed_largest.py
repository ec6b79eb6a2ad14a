"""Models with states larger than the device: how much of the device and its host do they take?

    python -m benchmarks.streamed_largest

gpt_10b for rtx4090 (24 GB) and gpt_20b for h200 within 40 GiB, as `python -m experiments.train`
trains them (released, dropout, clipped by layer), every layer recomputed. Each is compiled with all
layers' states in host memory, and with as many layers on the device as arithmetic says that the
limit leaves room for, from the bytes of the first compile. `resident` is what states alone take on
a device: 12 bytes a parameter. No step is run.
"""

import functools
import warnings
from typing import Any

import jax

from benchmarks.shared.results import Report
from experiments.command.load import load
from experiments.models import registry
from experiments.steps.accumulate import released_step
from jaxmem._core.assignment import Assignment
from jaxmem._target.compile.options import options_of
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._target.hlo.transfers import fault
from jaxmem._trace.export import export_flat

# config -> the GPU, its compute capability, and the bytes of device and host memory to stay within
MODELS: dict[str, tuple[str, int, int, int]] = {
    "gpt_10b": ("rtx4090", 89, 24 * 10**9, 192 * 10**9),
    "gpt_20b": ("h200", 90, 40 * 2**30, 1024 * 10**9),
}
SPARE = 0.02  # of the device, as plans leave for targets that are not there


def nbytes(tree) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


@functools.cache
def step_and_shapes(name: str) -> Any:
    config = load(name)
    step = released_step(config, Assignment({"block": {}}))
    state = jax.eval_shape(lambda: step.init(registry.create(config, jax.random.key(0))))
    return config, step, state


def compiled(name: str, compiler: Compiler, persist: int) -> Compiled:
    config, step, state = step_and_shapes(name)
    args = step.split(state, persist), registry.batch_shape(config)
    key = jax.eval_shape(lambda: jax.random.key(0))
    traced = jax.jit(step, donate_argnums=0).trace(*args, key)
    exported, donated = export_flat(traced, "cuda", MODELS[name][1])
    options = options_of("cuda", traced)  # those that experiments compile such a step with
    return compiler.submit(exported, donated=donated, options=options).result()


def run(report: Report, name: str) -> None:
    target, _, most, most_host = MODELS[name]
    config, _, (params, moments) = step_and_shapes(name)
    layers = nbytes([t["blocks"] for t in (params, moments.mu, moments.nu)]) // config.model.layers
    with Compiler(target, workers=1) as compiler:
        for which in ("none on the device", "as many as fit"):
            if report.has(key := f"{name}, {target}, {which}"):
                continue
            persist = 0
            if which == "as many as fit":
                least = report[f"{name}, {target}, none on the device"]["device"]
                persist = int((most * (1 - SPARE) - least) // layers)
            found = compiled(name, compiler, persist)
            report.add(
                key,
                {
                    "parameters": sum(a.size for a in jax.tree.leaves(params)),
                    "layers": config.model.layers,
                    "persist": persist,
                    "resident": nbytes((params, moments)),
                    "device": found.total_bytes,
                    "of": most,
                    "host": found.host_bytes,
                    "of host": most_host,
                    "within": found.total_bytes <= most and found.host_bytes <= most_host,
                    "fault": fault(found.transfers),
                },
            )


def main() -> None:
    report = Report("streamed_largest")
    warnings.simplefilter("ignore")
    for name in MODELS:
        run(report, name)
    rows = report.results.values()
    report.summarise(
        {
            "within": all(r["within"] and r["fault"] is None for r in rows),
            "used of the device": {
                k: r["device"] / r["of"] for k, r in report.results.items() if r["persist"]
            },
        }
    )


if __name__ == "__main__":
    main()

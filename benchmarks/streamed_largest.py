"""Models with states larger than the device: how much of the device and its host do they take?

    python -m benchmarks.streamed_largest

gpt_10b for rtx4090 (24 GB) and gpt_20b for h200 within 40 GiB, as `python -m experiments.train`
trains them (released, dropout, clipped by layer), every layer recomputed. Each is compiled with all
layers' states in host memory, and with as many layers on the device as arithmetic says that the
limit leaves room for, from the bytes of the first compile. `resident` is what states alone take on
a device: 12 bytes a parameter. No step is run.
"""

import jax

from benchmarks.shared.released import nbytes, state_of, step_of
from benchmarks.shared.results import Report
from benchmarks.shared.steps import compiled
from experiments.command.load import load
from experiments.models import registry
from jaxmem._core.assignment import Assignment
from jaxmem._target.compile.options import options_of
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._target.hlo.transfers import fault

# config -> the GPU, its compute capability, and the bytes of device and host memory to stay within
MODELS: dict[str, tuple[str, int, int, int]] = {
    "gpt_10b": ("rtx4090", 89, 24 * 10**9, 192 * 10**9),
    "gpt_20b": ("h200", 90, 40 * 2**30, 1024 * 10**9),
}
SPARE = 0.02  # of the device, as plans leave for targets that are not there


def row(name: str, step, state, persist: int) -> dict:
    """The step with the states of `persist` layers on the device, compiled."""
    target, capability, most, most_host = MODELS[name]
    config, key = load(name), jax.eval_shape(lambda: jax.random.key(0))
    args = step.split(state, persist), registry.batch_shape(config), key
    traced = jax.jit(step, donate_argnums=0).trace(*args)
    options = options_of("cuda", traced)  # those that experiments compile such a step with
    with Compiler(target, workers=1) as compiler:
        found = compiled(compiler, traced, capability, options)
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


def run(report: Report, name: str) -> None:
    target, _, most, _ = MODELS[name]
    config = load(name)
    step = step_of(config, Assignment({"block": {}}), dtype=None)
    state = params, moments = state_of(config, step)
    layer = nbytes([t["blocks"] for t in (params, moments.mu, moments.nu)]) // config.model.layers
    none, fit = (f"{name}, {target}, {w}" for w in ("none on the device", "as many as fit"))
    least = report.once(none, row, name, step, state, 0)["device"]
    report.once(fit, row, name, step, state, int((most * (1 - SPARE) - least) // layer))


def summary(report: Report) -> dict:
    rows = report.results
    used = {k: r["device"] / r["of"] for k, r in rows.items() if r["persist"]}
    within = all(r["within"] and r["fault"] is None for r in rows.values())
    return {"within": within, "used of the device": used}


def main() -> None:
    Report("streamed_largest").for_each(MODELS, run, summary)


if __name__ == "__main__":
    main()

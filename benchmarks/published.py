"""Predictions against measurements that others published: step seconds and bytes of steps that ran
on real TPUs and GPUs, rebuilt from their dimensions and compiled here without hardware.

    python -m benchmarks.published [RESULT ...]

The rows are in `benchmarks/published.json`: source with its commit, model, mesh, rematerialization,
attention, and what was measured. Each row has all that is needed to compile the step. A row that is
`aside` takes no part in the fit of a constant of the cost model; its measured time was known.

`published_steps`: dense decoders on slices of TPUs, rebuilt by `benchmarks/shared/decoder.py`.
`seconds` is the prediction: a roofline of XLA's fusions at datasheet rates (docs/tpu.md). `ratio`
is predicted over measured. Two rows have no time: one step ran, and one ran out of memory; `fits`
says whether the compiled bytes are within the device's memory.

`published_bytes`: the programs of JAX's page about host offloading, gradients of ten layers in a
scan, whose bytes the page prints for a T4.
"""

import os
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.shared import devices
from benchmarks.shared.case import on
from benchmarks.shared.decoder import Row, flags_of, offloading, step_of
from benchmarks.shared.results import Benchmark, Report, known, measure
from jaxmem._core.database import Database
from jaxmem._core.files import read_json
from jaxmem._target.compile.backend import LIBTPU_FLAGS
from jaxmem._trace.step import trace

PUBLISHED: dict[str, Row] = {
    row["id"]: row for row in read_json(pathlib.Path(__file__).parent / "published.json")
}
# Not a dense decoder, or not on a TPU; and a compile for 512 devices, which takes too long here.
OTHERS = "gemma3", "deepseek", "mixtral", "h100", "a100", "t4-", "tpu7x"
DENSE = [name for name in PUBLISHED if not any(word in name for word in OTHERS)]


def compiled(name: str) -> dict[str, Any]:
    """The compiled step of one row."""
    row = PUBLISHED[name]
    build, args = step_of(row)
    # The compiler's process reads the flags when it starts.
    os.environ[LIBTPU_FLAGS] = flags_of(row)
    with on(row["target"], Database()) as backend:
        step = backend.compile_buffers(*trace(build, None, args)).result()
        room = backend.target.usable_bytes
    found = {
        "seconds": step.xla_seconds,
        "bytes": step.total_bytes,
        "host bytes": step.host_bytes,
        "matmul_flops": step.matmul_flops,
        "fits": step.total_bytes <= room,
        "compile seconds": step.compile_seconds,
    }
    measured = row["measured"]
    seconds = measured.get("step_time_s", measured.get("step_time_derived_s"))
    if seconds is None:
        return found
    return found | {"measured": seconds, "ratio": known(step.xla_seconds) / seconds}


def of_steps(report: Report) -> dict[str, Any]:
    """Errors of the predicted seconds: of all rows, and of the rows that are aside."""
    timed = {name: row["ratio"] for name, row in report.results.items() if "ratio" in row}
    aside = [ratio for name, ratio in timed.items() if PUBLISHED[name]["aside"]]
    off = lambda ratios: [abs(ratio - 1) for ratio in ratios]
    fits = [
        row["fits"] != PUBLISHED[name]["measured"].get("runs_out_of_memory", False)
        for name, row in report.results.items()
    ]
    return {
        "rows": len(timed),
        "median error": statistics.median(off(timed.values())),
        "within 30 %": sum(e <= 0.3 for e in off(timed.values())),
        "rows aside": len(aside),
        "largest error aside": max(off(aside), default=None),
        "memory is right": f"{sum(fits)} of {len(fits)}",
    }


# -- published_bytes

LAYERS, WIDTH, HIDDEN = 10, 256, 1024
NOTEBOOK = [name for name in PUBLISHED if name.startswith("t4-")]


def offloaded(name: str) -> dict[str, Any]:
    """The compiled bytes of one program of the page, against the bytes that the page prints."""
    activations, weights = "activation" in name, "parameter" in name
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,))
    there = lambda kind: NamedSharding(mesh, P(), memory_kind=kind)

    def layer(x, w):
        if weights:
            w = jax.tree.map(lambda a: jax.device_put(a, jax.memory.Space.Device), w)
        return checkpoint_name(x, "x") @ w[0] @ w[1], None

    def total(w, x):
        body = (
            jax.remat(layer, policy=offloading([], ["x"]), prevent_cse=False)
            if activations
            else layer
        )
        return jax.lax.scan(body, x, w)[0].sum()

    stored = there("pinned_host" if weights else "device")
    shape = lambda sharding, *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=sharding)
    w = shape(stored, LAYERS, WIDTH, HIDDEN), shape(stored, LAYERS, HIDDEN, WIDTH)
    step = jax.jit(jax.grad(total), out_shardings=there("device"))
    found = devices.compiled("t4", step.trace(w, shape(there("device"), WIDTH, WIDTH)))
    printed = PUBLISHED[name]["measured"]["compiled_total_bytes"]
    return {"bytes": found.total_bytes, "printed": printed, "ratio": found.total_bytes / printed}


RESULTS = {
    "published_steps": Benchmark(DENSE, row=compiled, summary=of_steps),
    "published_bytes": Benchmark(NOTEBOOK, row=offloaded),
}

if __name__ == "__main__":
    measure("published", RESULTS)

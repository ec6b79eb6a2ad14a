"""How long a piece of work takes on a target: measured there, read from XLA's own fusions, or a
roofline.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem._core.database import Database
from jaxmem._device.rates import rates_of
from jaxmem._device.target import Target
from jaxmem._jax.jaxpr import matmul_flops, nbytes, text_of


@dataclasses.dataclass(frozen=True)
class Job:
    """A function of arrays shaped like `avals`, to be timed as one fused program."""

    function: Callable
    avals: tuple

    @property
    def specs(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.avals]


def job_seconds(
    jobs: Sequence[Job], target: Target, compiler=None, database: Database | None = None
) -> tuple[list[float], str]:
    """Seconds of each job on `target`, and where they come from: "measured", "xla" or "roofline".

    Measured where the target is the device at hand; else read from XLA's estimate of each fusion,
    which `compiler` (a deviceless `Compiler`) gives; else a roofline of the target's ceilings.
    Equal work is timed once, and never again while its time stands in `database`.
    """
    database = database or Database()
    traced = [jax.make_jaxpr(job.function)(*job.specs) for job in jobs]
    texts = [text_of(t) for t in traced]
    unique = dict(zip(texts, jobs))
    codec = rates_of(target.gpu).codec if target.gpu else target.bandwidth
    roofline = {text: _roofline(jaxpr, target, codec) for text, jaxpr in zip(texts, traced)}
    priced = (
        compiler is not None and target.gpu is not None and target.gpu.priced
    )  # XLA has a price list for this GPU
    source = "measured" if target.local else "xla" if priced else "roofline"
    device = f"{target.name} {target.kind}" + (f" codec {codec:.4g}" if target.gpu else "")
    if source == "roofline":
        return [roofline[t] for t in texts], source
    known = database.read_times(device, source, list(unique))
    missing = {t: j for t, j in unique.items() if t not in known}
    found = (
        {t: _measure(j) for t, j in missing.items()}
        if target.local
        else _estimate(missing, target, compiler)
    )
    if found is None:  # this XLA gives no estimates: one source for all, or none compare
        return [roofline[t] for t in texts], "roofline"
    database.write_times(device, source, found)
    return [(known | found)[t] for t in texts], source


def _estimate(jobs: dict[str, Job], target: Target, compiler) -> dict[str, float] | None:
    """By XLA; None where it prices not all of them."""
    from jaxmem._jax.export import export_flat

    futures = {}
    for text, job in jobs.items():
        exported, donated = export_flat(
            jax.jit(job.function).trace(*job.specs), "cuda", target.compute_capability
        )
        futures[text] = compiler.submit(exported, donated=donated, cost=True)
    seconds = {text: future.result().xla_seconds for text, future in futures.items()}
    return None if None in seconds.values() else seconds


_CODEC = tuple(f"jaxmem_{verb}" for verb in ("quantize", "dequantize", "pack_bits", "unpack_bits"))


def _roofline(jaxpr, target: Target, codec: float) -> float:
    """Each matrix product at the slower of its rate and its traffic; everything else reads and
    writes the ends once.

    `codec`: B/s where that is a codec's kernel.
    """
    traffic = sum(
        nbytes(v.aval) for v in (*jaxpr.jaxpr.invars, *jaxpr.jaxpr.outvars) if hasattr(v, "aval")
    )
    products = 0.0
    for eqn in jaxpr.jaxpr.eqns:
        flops = matmul_flops(eqn)[0]
        if flops:
            moved = sum(nbytes(v.aval) for v in (*eqn.invars, *eqn.outvars))
            products += max(flops / target.matmul_flops, moved / target.bandwidth)
    is_codec = any(eqn.primitive.name.startswith(_CODEC) for eqn in jaxpr.jaxpr.eqns)
    return max(products, traffic / (codec if is_codec else target.bandwidth))


def _measure(job: Job, least_seconds: float = 0.02) -> float:
    arguments = [_sample(a) for a in job.avals]
    run = jax.jit(job.function).lower(*job.specs).compile()
    jax.block_until_ready(run(*arguments))
    best, spent, rounds = math.inf, 0.0, 0
    while rounds < 7 or (spent < least_seconds and rounds < 50):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        elapsed = time.perf_counter() - start
        best, spent, rounds = min(best, elapsed), spent + elapsed, rounds + 1
    return best


def _sample(aval):
    """An array of ordinary numbers: timing must not meet denormals, and a random key must be a key."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        key = jax.random.key(0, impl=str(jax.random.key_impl(jax.random.key(0))))
        return jnp.broadcast_to(key, aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        values = np.random.default_rng(0).standard_normal(aval.shape, np.float32)
        return jnp.asarray(values).astype(aval.dtype)
    return jnp.zeros(aval.shape, aval.dtype)

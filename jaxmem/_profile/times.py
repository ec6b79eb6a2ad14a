"""How long pieces of work take on a target: as its backend says, else by a roofline."""

from collections.abc import Sequence

import jax

from jaxmem._core.database import Database, Timing
from jaxmem._device.rates import rates_of
from jaxmem._device.target import Target
from jaxmem._jax.jaxpr import matmul_flops, nbytes, text_of
from jaxmem._jax.job import Job


def job_seconds(
    jobs: Sequence[Job], backend, database: Database | None = None
) -> tuple[list[float], str]:
    """Seconds of each job, and where they come from: "measured", "xla" or "roofline".

    jobs: pieces of work; equal ones are timed once.
    backend: a `jaxmem._xla.backend.Backend`: it measures or estimates, or knows no times.
    database: where times stand that are known, and new ones are written.

    One source serves for all jobs, since times of different sources do not compare.
    """
    target, source, database = backend.target, backend.source, database or Database()
    traced = [jax.make_jaxpr(job.function)(*job.specs) for job in jobs]
    texts = [text_of(t) for t in traced]
    codec = rates_of(target.gpu).codec if target.gpu else target.bandwidth
    if source != "roofline":
        device = f"{target.name} {target.kind}" + (f" codec {codec:.4g}" if target.gpu else "")
        unique = dict(zip(texts, jobs))
        times = database.read_times(device, source, list(unique))
        known = {text: timing.seconds for text, timing in times.items()}
        missing = [text for text in unique if text not in known]
        found = backend.seconds([unique[text] for text in missing])
        if found is not None:
            new = dict(zip(missing, found))
            timings = {text: Timing(seconds) for text, seconds in new.items()}
            database.write_times(device, source, timings)
            return [(known | new)[text] for text in texts], source
    return [_roofline(t, target, codec) for t in traced], "roofline"


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

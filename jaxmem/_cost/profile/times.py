"""The seconds of pieces of work on a target: from the target's backend, else by a roofline."""

import contextlib
import contextvars
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax

from jaxmem._core.database import Database, Timing
from jaxmem._target.devices.rates import rates_of
from jaxmem._target.devices.target import Target
from jaxmem._trace.jaxpr import matmul_flops, nbytes, text_of
from jaxmem._trace.job import Job
from jaxmem.errors import StepError

# Spreads above it show a busy machine: the result `time_spread` has 0.08 to 0.12 on an idle
# machine, and 0.27 to 0.66 with other work, where times were 1.7 times too long.
BUSY = 0.2
RETRY_SECONDS = 600  # busy times are measured again, but not by each plan of the same busy minutes
# By how much work may take longer than an estimate of its time, as a share of it. Estimates take
# codecs' kernels to run at 0.8 of the memory's rate (`_target/devices/rates.py`), which is not
# measured: a kernel at 0.55 of it takes half as much again. A roofline leaves out launches and
# caches too.
ESTIMATED, CEILING = 0.5, 1.0
OLD_SECONDS = 30 * 86400  # drivers, clocks and coolers change, and measuring takes seconds a month


# Set while planning runs in a thread during training: returns True once the training has ended.
_ENDED: contextvars.ContextVar[Callable[[], bool] | None] = contextvars.ContextVar(
    "beside training", default=None
)


@contextlib.contextmanager
def beside_training(ended: Callable[[], bool]) -> Iterator[None]:
    """Marks this thread as planning during training, while the `with` statement runs. The device is
    busy with the training: earlier measurements are used whatever their age, and whole steps are
    not run. Nothing is compiled once `ended()` returns True.
    """
    before = _ENDED.set(ended)
    try:
        yield
    finally:
        _ENDED.reset(before)


def is_beside_training() -> bool:
    return _ENDED.get() is not None


def check_goes_on() -> None:
    """Raises StepError if this thread plans during a training, and the training has ended."""
    if (ended := _ENDED.get()) is not None and ended():
        raise StepError("plan: the training that the plan was made beside has ended")


@dataclasses.dataclass(frozen=True)
class Times:
    """The seconds of jobs, and how they were found.

    seconds: the seconds of each job, in the order of the jobs.
    source: "measured", "xla" or "roofline", for all jobs.
    disturbed: the share of different jobs that were measured while the machine was busy.
    uncertainty: how much longer a job may take, as a share of its seconds. The time of a measured
      job is its least run; the uncertainty is how far the median run was above the least.
    """

    seconds: list[float]
    source: str
    disturbed: float = 0.0
    uncertainty: float = CEILING


def job_times(jobs: Sequence[Job], backend, database: Database | None = None) -> Times:
    """Returns the seconds of each job's whole work, from the backend, or else by a roofline.

    jobs: pieces of work; equal jobs are timed once.
    backend: measures or estimates times, or knows none.
    database: stores the times of earlier jobs, and receives new times; None means the default.

    A time comes from the database. It is measured again if it was measured on a busy machine or
    long ago. All times have one source, since times of different sources do not compare. So a job
    that cannot be timed gets its roofline, multiplied by the seconds of all timed jobs over the
    rooflines of these jobs. If no job can be timed, each gets its roofline. A mesh that is set
    (`jax.set_mesh`) would divide the pieces, so no mesh is set here. Pieces are priced whole unless
    they hold a `jax.shard_map`.
    """
    with jax.set_mesh(None):
        return _job_times(jobs, backend, database)


def _job_times(jobs: Sequence[Job], backend, database: Database | None) -> Times:
    """The times of jobs, outside of any mesh; see `job_times`."""
    target, source, database = backend.target, backend.source, database or Database()
    texts = [text_of(job.jaxpr) for job in jobs]
    codec = rates_of(target.chip).codec if target.chip else target.bandwidth
    work = [_roofline(job.jaxpr, target, codec) for job in jobs]
    if source != "roofline":
        unique = dict(zip(texts, jobs))
        times, now = database.read_times(backend.device, source, list(unique)), time.time()
        stale = lambda text: source == "measured" and due(times[text], now)
        wanted = [text for text in unique if text not in times or stale(text)]
        # None if the backend does not know all of them: the roofline then serves for every job.
        found = backend.times([unique[text] for text in wanted])
        pairs = zip(wanted, found or ())
        new = {text: _better(times.get(text), one) for text, one in pairs if one is not None}
        database.write_times(backend.device, source, new)
        times |= new
        if found is not None and (times or not jobs):
            spreads = [timing.spread for timing in times.values()] or [0.0]
            busy = sum(spread > BUSY for spread in spreads) / len(spreads)
            uncertainty = statistics.median(spreads) if source == "measured" else ESTIMATED
            # A job on a mesh runs on all of its devices: each takes the time of its part.
            own = {t: job.shards * times[t].seconds for t, job in unique.items() if t in times}
            known = sum(roofline for t, roofline in zip(texts, work) if t in own)
            factor = sum(own[t] for t in texts if t in own) / known if known else 1.0
            seconds = [own.get(t, factor * roofline) for t, roofline in zip(texts, work)]
            return Times(seconds, source, busy, uncertainty)
    return Times(work, "roofline")


def due(timing: Timing, now: float) -> bool:
    """Whether a measured time is worth measuring again, and the device is free."""
    age = abs(now - timing.written)  # a clock that was set back makes a time old, not eternal
    retry = age > RETRY_SECONDS and timing.spread > BUSY
    return not is_beside_training() and (age > OLD_SECONDS or retry)


def _better(old: Timing | None, new: Timing) -> Timing:
    """Returns the timing to store after a new measurement.

    A new measurement on a quiet machine replaces the old one. Otherwise the lesser time is stored,
    since disturbance only adds time, with the spread of the new measurement.
    """
    if old is None or new.spread <= BUSY:
        return new
    return dataclasses.replace(new, seconds=min(old.seconds, new.seconds))


# Prefixes of the names of the primitives of codecs' kernels (`kernels/jaxmem_kernels/ops.py`). A
# kernel with another name gets the rate of the device's memory.
_CODEC = tuple(f"jaxmem_{verb}" for verb in ("quantize", "dequantize", "pack_bits", "unpack_bits"))


def _roofline(jaxpr, target: Target, codec: float) -> float:
    """Seconds by the target's ceilings: each matrix product takes the slower of its rate and its
    traffic; everything else reads the program's inputs and writes its outputs once.

    `codec` is the rate of that traffic, in B/s, where the program holds a codec's kernel.
    """
    traffic = sum(
        nbytes(v.aval) for v in (*jaxpr.jaxpr.invars, *jaxpr.jaxpr.outvars) if hasattr(v, "aval")
    )
    products = 0.0  # seconds
    for eqn in jaxpr.jaxpr.eqns:
        flops = matmul_flops(eqn)[0]
        if flops:
            moved = sum(nbytes(v.aval) for v in (*eqn.invars, *eqn.outvars))
            products += max(flops / target.matmul_flops, moved / target.bandwidth)
    is_codec = any(eqn.primitive.name.startswith(_CODEC) for eqn in jaxpr.jaxpr.eqns)
    return max(products, traffic / (codec if is_codec else target.bandwidth))

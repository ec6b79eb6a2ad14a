"""Times pieces of a program, and copies to host memory and back, on the device at hand."""

import functools
import re
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem._core.database import Timing
from jaxmem._trace.arguments import key_impl
from jaxmem._trace.job import Job

NBYTES = 2**26  # bytes that are copied; caches hold less
ROUNDS = 5
# Different whole numbers in a made-up array of at least `LARGE` numbers. Smaller arrays are 0: they
# may be sizes of groups.
INDICES, LARGE = 8, 1024
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
# Calls of Python in a lowered program: of CPUs and GPUs, and of TPUs.
_PYTHON = re.compile(r"@xla_\w*python\w*_callback|is_host_transfer = true")


def measure_all(jobs: Sequence[Job]) -> list[Timing | None]:
    """Times each job by the least of several runs: other work on the machine only adds time. A job
    that cannot be timed has None.

    A job's spread is the distance of the median of its runs from the least. Every job gets the
    median of all jobs' spreads: other work may slow all runs of one job alike, which its own spread
    does not show, but the many jobs of the same minute show whether the machine was busy.
    """
    rounds = [measure(job) for job in jobs]
    spreads = [statistics.median(r) / min(r) - 1 for r in rounds if r] or [0.0]
    return [Timing(min(r), statistics.median(spreads)) if r else None for r in rounds]


def measure(job: Job, least_seconds: float = 0.02) -> list[float]:
    """Returns the seconds of each run of a job, after one run that is not counted.

    There are 7 runs, and more until they add up to `least_seconds`, but at most 50. There are none
    for a job that fails in XLA, such as for too little memory, or that calls Python. A `Job` has no
    such calls in its jaxpr, but a primitive of a library may lower to one (lineax checks solutions
    so). On made-up numbers a check raises, and what is printed would mislead.
    """
    traced = job.trace(jax.devices())
    lowered = traced.lower()
    if _PYTHON.search(lowered.as_text()):
        return []
    try:
        run = lowered.compile()
        shardings = run.input_shardings[0]  # None for an argument that the program does not read
        pairs = zip(traced.jaxpr.in_avals, shardings)
        arguments = [jax.device_put(sample(aval), sharding) for aval, sharding in pairs]
        run_seconds(run, *arguments)  # the run that is not counted
    except jax.errors.JaxRuntimeError:
        return []
    rounds: list[float] = []
    while len(rounds) < 7 or (sum(rounds) < least_seconds and len(rounds) < 50):
        rounds.append(run_seconds(run, *arguments))
    return rounds


def run_seconds(run: Callable, /, *args, **kwargs) -> float:
    """Returns the seconds of one run of a compiled program."""
    start = time.perf_counter()
    jax.block_until_ready(run(*args, **kwargs))
    return time.perf_counter() - start


def sample(aval, size: float = 1.0):
    """Returns an array of ordinary numbers for `aval`, of about `size` where they are not whole:
    denormals would slow arithmetic down, and a random key must be a key.

    Whole numbers may be indices, and are small. The numbers of a large array take `INDICES` values
    in turn. If all were 0, a GPU would add the whole gradient of an embedding into one row, one
    addition after the other.
    """
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=key_impl(aval)), aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        values = np.random.default_rng(0).standard_normal(aval.shape, np.float32)
        return jnp.asarray(values * np.float32(size)).astype(aval.dtype)
    if jnp.issubdtype(aval.dtype, jnp.integer) and aval.size >= LARGE:
        return jnp.resize(jnp.arange(INDICES), aval.shape).astype(aval.dtype)
    return jnp.zeros(aval.shape, aval.dtype)


@functools.cache
def measured_link() -> tuple[float, float] | None:
    """Bytes a second to the device and to pinned host memory, by the least of several copies each;
    None where the device has no such memory.
    """
    if not any(m.kind == "pinned_host" for m in jax.local_devices()[0].addressable_memories()):
        return None
    here = jax.block_until_ready(jnp.ones(NBYTES // 4, jnp.float32))
    there = jax.block_until_ready(jax.device_put(here, HOST))
    # What is copied is made anew in each run, else XLA hands the argument on as it is.
    to_host = jax.jit(lambda a: jax.device_put(a + 1, HOST))
    to_device = jax.jit(lambda a: jax.device_put(a, DEVICE) + 1)
    plain = _least(jax.jit(lambda a: a + 1), here)
    # A copy's time is the time of a run less the time of its arithmetic, and at least a tenth of
    # the latter.
    rate = lambda run, a: NBYTES / max(_least(run, a) - plain, 0.1 * plain)
    return rate(to_device, there), rate(to_host, here)


def _least(run: Callable, a) -> float:
    """Returns the least seconds of several runs, after one run that is not counted."""
    run_seconds(run, a)
    return min(run_seconds(run, a) for _ in range(ROUNDS))

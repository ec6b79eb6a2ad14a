"""Common code of the parts: the description of the machine, wall-clock times, quartiles."""

import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.errors import InputError
from experiments.gpu_check.settings import Settings

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "flax",
    "optax",
    "numpy",
    "pulp",
    "highspy",
    "triton",
    "libtpu",
)


def about(settings: Settings) -> dict:
    """Returns versions, device and driver. Raises InputError on a CPU unless `settings.small`."""
    device = jax.local_devices()[0]
    if device.platform == "cpu" and not settings.small:
        raise InputError("JAX sees no GPU or TPU here; --small rehearses on a CPU")
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = (device.memory_stats() or {}).get("bytes_limit")
    where = {
        "device": device.device_kind,
        "driver": driver(),
        "memory_bytes": memory,
        "cores": cores,
    }
    return {"versions": versions} | where


def driver() -> str | None:
    """Returns the version of the GPU driver; None if unknown."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, encoding="utf-8", check=True, timeout=20)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        found = re.search(r"\d+\.\d+(\.\d+)?", text)
        return found and found[0]
    except OSError:
        return None


def check_cache() -> None:
    """Disables the cache of compiled programs if a cached program reports other bytes than a
    compiled one. Plans depend on these bytes.
    """
    here = getattr(jax.config, "jax_compilation_cache_dir", None)
    if here is None:
        return

    def temporaries() -> int:
        spec = jax.ShapeDtypeStruct((257, 129), jnp.float32)
        memory: Any = (
            jax.jit(lambda x: jnp.sort(x @ x.T, axis=0) @ x).lower(spec).compile().memory_analysis()
        )
        return memory.temp_size_in_bytes

    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        reset_cache()
        try:
            sound = temporaries() == temporaries() > 0
        except (
            jax.errors.JaxRuntimeError,
            AttributeError,
        ):  # the cached program cannot be read, or reports no bytes
            sound = False
    jax.config.update("jax_compilation_cache_dir", here if sound else None)
    reset_cache()


def reset_cache() -> None:
    """Closes JAX's compilation cache. JAX opens the cache once, so a new folder needs this call."""
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()
    jax.clear_caches()


IN_FLIGHT = 8  # calls that the host issues before it waits


def seconds_of(run: Callable[[], Any], least: int = 10, most_seconds: float = 1.0) -> list[float]:
    """Returns the seconds of a call, several times. Two earlier calls, which compile and warm up,
    do not count.

    The host issues `IN_FLIGHT` calls before it waits, so that its own work, 0.1 to 0.2 ms a call,
    runs at the same time as the device.
    """
    for _ in range(2):
        jax.block_until_ready(run())
    taken: list[float] = []
    while len(taken) < least or (sum(taken) * IN_FLIGHT < most_seconds and len(taken) < 10 * least):
        taken.append(in_flight(run))
    return taken


def in_flight(run: Callable[[], Any]) -> float:
    """Returns the seconds of one of `IN_FLIGHT` calls."""
    start = time.perf_counter()
    for _ in range(IN_FLIGHT):
        last = run()  # an earlier result is freed as soon as the device is done with it
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / IN_FLIGHT


def quartiles(values: Sequence[float]) -> dict[str, float]:
    low, median, high = np.percentile(np.asarray(values), [25, 50, 75])
    return {
        "median": float(median),
        "lower_quartile": float(low),
        "upper_quartile": float(high),
        "count": len(values),
    }


def normal(shape: tuple[int, ...], dtype, seed: int = 0) -> jax.Array:
    """Returns normal numbers, made on the device. Zeros would be faster than a model's values."""
    make = jax.jit(
        lambda: jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)
    )
    return make()

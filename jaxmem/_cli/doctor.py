"""Checks versions, devices and settings, and names known faults with their remedies."""

import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Mapping

from jaxmem._core.bytes import show_bytes
from jaxmem._core.database import check, counted, default_path, usage
from jaxmem._core.versions import HOST_OFFSETS_SINCE, installed, release
from jaxmem._target.deviceless.wheels import (
    install_command,
    libtpu_command,
    plugin_command,
    require_wheels,
)
from jaxmem._target.devices.support import PIPELINED, pipelines_host_transfers
from jaxmem._target.devices.target import Target
from jaxmem.errors import TargetError

PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "numpy", "pulp", "highspy", "jax-triton", "triton",
    "libtpu", "rich",
)  # fmt: skip
PREALLOCATE, FRACTION = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check.

    name: the name of the checked thing.
    found: the result in words.
    remedy: the remedy for a fault. None if there is no fault.
    level: "ok"; "note" if a capability is missing; "bad" if something will fail.
    """

    name: str
    found: str
    remedy: str | None = None
    level: str = "ok"


def examine() -> list[Check]:
    """Makes every check, of this process's environment."""
    found = {name: version for name in PACKAGES if (version := installed(name)) is not None}
    checks = [Check("python", sys.version.split()[0]), *(Check(n, v) for n, v in found.items())]
    checks += combinations(found)
    checks += _devices()
    checks += settings(os.environ, _platform() in ("gpu", "cuda", "rocm"))
    checks += [kernels(found), terminal(found), *absent(), _assembler(), cache()]
    return checks


def combinations(found: Mapping[str, str]) -> list[Check]:
    """Names the combinations of versions that are known to fail, a check for each. Without such a
    combination, one check says so.

    found: package -> its installed version.
    """
    have = {name: release(version) for name, version in found.items()}
    none = (0,)
    jax, jaxlib = have.get("jax", none), have.get("jaxlib", none)
    # Each row: whether this machine has the fault, the fault, the remedy, and the level.
    known = (
        (
            # Remove with jaxlib 0.11.0: the row.
            jaxlib < HOST_OFFSETS_SINCE,
            f"jaxlib {found.get('jaxlib')} reads what a scan offloads on a GPU at wrong offsets, so"
            " jaxmem never offloads there",
            "to offload: Python 3.12 and pip install 'jax>=0.11.2'",
            "note",
        ),
        (
            # Remove with flax 0.12.10: the row, once the extra requires flax 0.12.11.
            "flax" in have and jax >= (0, 11, 2) and have["flax"] < (0, 12, 11),
            f"flax {found.get('flax')} does not import with jax {found.get('jax')}",
            "pip install --upgrade 'flax>=0.12.11'",
            "bad",
        ),
        (
            # Remove with CUDA 13.0: the row, and the bound on triton in pyproject.toml.
            have.get("triton", none) >= (3, 9),
            f"triton {found.get('triton')} writes PTX that a CUDA 13.0 driver cannot read",
            "pip install 'triton>=3.6,<3.9', or a newer driver",
            "bad",
        ),
        (
            # Remove with JAX 0.10: the row.
            have.get("jax-triton", none) >= (0, 4) and jax < (0, 11),
            f"jax-triton {found.get('jax-triton')} needs jax 0.11, and this is {found.get('jax')}",
            "pip install 'jax-triton<0.4'",
            "bad",
        ),
        (
            jax[:2] != jaxlib[:2],
            f"jax {found.get('jax')} with jaxlib {found.get('jaxlib')}",
            f"pip install 'jaxlib=={found.get('jax')}'",
            "bad",
        ),
    )
    amiss = [
        Check("versions", what, remedy, level) for is_here, what, remedy, level in known if is_here
    ]
    return amiss or [Check("versions", "no combination that is known to fail")]


def kernels(found: Mapping[str, str]) -> Check:
    """Tells whether codecs run as Triton kernels on CUDA."""
    missing = [name for name in ("jax-triton", "triton") if name not in found]
    if missing:
        what = f"without {' and '.join(missing)}, codecs on CUDA are what XLA makes of them"
        return Check("kernels", what, "pip install 'jaxmem[gpu]'", "note")
    return Check("kernels", "codecs on CUDA are Triton kernels")


def terminal(found: Mapping[str, str]) -> Check:
    """Tells whether tables and progress fit the terminal."""
    if "rich" not in found:
        what = "without rich, tables and progress are plain text as wide as it is"
        return Check("terminal", what, "pip install 'jaxmem[cli]'", "note")
    return Check("terminal", "rich draws tables and progress")


def settings(environment: Mapping[str, str], gpu: bool) -> list[Check]:
    """Names environment variables that change the meaning of a budget.

    gpu: whether JAX runs on a GPU.
    """
    flags = environment.get("XLA_FLAGS", "")
    share = environment.get(FRACTION)
    in_parts = environment.get(PREALLOCATE, "true").lower() in ("false", "0")
    known = (
        (
            "--xla_gpu_enable_latency_hiding_scheduler=true" in flags,
            "XLA_FLAGS",
            flags,
            "with the latency-hiding scheduler unrolled layers keep on the device what they"
            " offload: scan over them",
        ),
        (
            pipelines_host_transfers(environment),
            "XLA_FLAGS",
            flags,
            "with the pipelining of host transfers a training run did not converge, so jaxmem never"
            f" offloads on a GPU: set --{PIPELINED}=false",
        ),
        (
            "xla_disable_hlo_passes=rematerialization" in flags.replace(" ", ""),
            "XLA_FLAGS",
            flags,
            "XLA's own rematerialization is off: plans were made with it on",
        ),
        (
            gpu and in_parts,
            PREALLOCATE,
            "false: memory is taken as it is needed, and may fragment",
            f"for budgets near the device's memory set {PREALLOCATE}=true and {FRACTION}=.95",
        ),
        (
            gpu and not in_parts and share is None,
            FRACTION,
            "not set: JAX takes 75 % of the device's memory",
            f"for budgets beyond that set {FRACTION}=.95 before Python starts",
        ),
    )
    checks = [Check(name, what, remedy, "note") for is_here, name, what, remedy in known if is_here]
    if gpu and not in_parts and share is not None:
        checks.append(Check(FRACTION, share))
    return checks or [Check("settings", "none that changes what a budget means")]


def _devices() -> list[Check]:
    """Names the first eight devices, with their memories and the bytes that programs may use."""
    import jax

    from jaxmem._model.tags.implementation import is_hijax, is_remat3

    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        remedy = "unset JAX_PLATFORMS, or set it to what there is"
        return [Check("devices", f"JAX finds none: {error}", remedy, "bad")]
    checks = []
    for device in devices[:8]:
        memories = ", ".join(sorted(m.kind for m in device.addressable_memories())) or "none"
        limit = (device.memory_stats() or {}).get("bytes_limit")
        size = f", {show_bytes(limit)} for programs" if limit else ""
        what = f"{device.device_kind}, memories: {memories}{size}"
        checks.append(Check(f"device {device.id}", what))
    if is_remat3() and not is_hijax():
        what = "on: jaxmem plans steps under it from JAX 0.12 on"
        remedy = "jax.config.update('jax_remat3', False), or pip install 'jax>=0.12'"
        checks.append(Check("jax_remat3", what, remedy, "bad"))
    return checks


def _platform() -> str:
    """JAX's platform, such as "gpu"; "none" where it finds no device."""
    import jax

    try:
        return jax.default_backend()
    except RuntimeError:
        return "none"


def absent() -> list[Check]:
    """Tells whether the compilers for absent GPUs and TPUs are installed, in the versions that jax
    requires. This check needs no device and no compile.
    """
    gpus = "plans for GPUs that are not there", "the compiler's two wheels are of jax's version"
    tpus = "plans for TPUs that are not there", "libtpu is of the version that jax asks for"
    looks = (("h200", gpus, plugin_command), ("v5e", tpus, libtpu_command))
    return [_compiler(target, *said, command) for target, said, command in looks]


def _compiler(target: str, name: str, there: str, command: Callable[[], str]) -> Check:
    """Tells whether the compiler for a target is installed.

    there: the result if it is.
    command: returns the command that installs it.
    """
    try:
        require_wheels(Target.parse(target))
    except TargetError:
        return Check(name, "no compiler of the version that jax asks for", command(), "note")
    return Check(name, there)


def _assembler() -> Check:
    """Tells whether NVIDIA's assembler is installed, from CUDA or from a wheel."""
    name, paths = "CUDA 13 assembler", [shutil.which("ptxas"), "/usr/local/cuda/bin/ptxas"]
    found = next((p for p in paths if p and os.path.exists(p)), None)
    if found is None and installed("nvidia-cuda-nvcc") is not None:
        found = "nvidia-cuda-nvcc " + str(installed("nvidia-cuda-nvcc"))
    if found is None:
        return Check(name, "none", install_command("nvidia-cuda-nvcc", "nvidia-nvvm"), "note")
    return Check(name, found)


def cache() -> Check:
    """Tells whether the cache of earlier plans' times and compiles can be read and written."""
    path, name = default_path(), "database of times"
    # the file, or else the nearest folder that exists, in which it would be made
    near = next(p for p in (path, *path.parents) if os.path.exists(p))
    if (what := check()) is not None:
        remedy = (
            "where it is damaged, the next plan moves it aside and begins a new one; where it"
            " cannot be read, let this user read and write it"
        )
        return Check(name, f"{path}: {what}", remedy, "note")
    if not all(os.access(p, os.W_OK) for p in (near, near if near.is_dir() else near.parent)):
        what = f"{path} cannot be written: each plan measures and compiles again"
        remedy = "let this user write there, or set XDG_CACHE_HOME to a folder where they can"
        return Check(name, what, remedy, "note")
    if not path.exists():
        return Check(name, f"{path}, not yet made")
    size, rows = usage()
    return Check(name, f"{path}, {show_bytes(size)}: {counted(rows)}")

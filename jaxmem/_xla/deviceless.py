"""Compiles steps for a GPU that is not there, in child processes with an environment of their own.

XLA:GPU needs no GPU to compile: the CUDA plugin's two wheels, a description of the device and
NVIDIA's assembler give its real buffer assignment. Nothing is autotuned there: a device may choose
other matrix kernels (about 1 % of bytes).
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

import jaxmem
import jaxmem_kernels
from jaxmem._core.versions import installed
from jaxmem._device.gpus import target_config
from jaxmem._device.rates import rates_of
from jaxmem._device.target import Target
from jaxmem._xla.buffers import Peak
from jaxmem._xla.compiled import Compiled
from jaxmem._xla.hlo import Rates
from jaxmem._xla.wire import read_message, write_message
from jaxmem.errors import StepError, TargetError

_PLUGIN_WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
_ASSEMBLER_MISSING = (
    "No PTX compilation provider",
    "libdevice not found",
    "ptxas not found",
    "Couldn't find a suitable version of ptxas",
)


class Compiler:
    """Compiles exported steps for `target`, up to `workers` at once. Use it in a `with` statement.

    Processes start with the first step and end with the statement, or with this process. A process
    that dies fails the step it was compiling; the next step starts another.

    Raises:
      TargetError: `target` is `local`, or the wheels that compiling needs are not there.
    """

    def __init__(self, target: "str | Target", *, workers: int = 2):
        self.target = Target.parse(target)
        gpu = self.target.gpu
        if gpu is None:
            raise TargetError(
                f"`target` is {str(self.target)!r}: only a named GPU is compiled for without a"
                " device; "
                "expected a name such as 'h200'"
            )
        require_wheels(str(self.target))
        self._gpu = gpu
        self._pool = concurrent.futures.ThreadPoolExecutor(workers, "jaxmem-compile")
        self._own = threading.local()
        self._children: set[_Child] = set()
        self._closed = False

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes, and with them the compiles that have not ended."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for child in list(self._children):
            child.kill()
        self._pool.shutdown(wait=True)
        for child in self._children:
            child.obituary()
        self._children.clear()

    def submit(
        self,
        exported: bytes,
        *,
        donated: tuple[int, ...] = (),
        cost: bool = False,
        options: Mapping[str, bool | int | str] | None = None,
    ) -> "concurrent.futures.Future[Compiled]":
        """Compiles what `export_flat` made. `options` are XLA's own compile options.

        `cost` asks for XLA's estimate of time, which there is for some GPUs (`Gpu.priced`). It
        turns XLA's untuned Triton products off, since it misjudges them; cuBLAS takes more
        workspace, so read bytes from a compile without it. The future raises StepError where XLA
        refuses the step, TargetError where the process fails.
        """
        gpu = self._gpu
        header = {
            "target_config": target_config(gpu),
            "devices": self.target.devices,
            "donated": list(donated),
            "cost": cost and gpu.priced,
            "options": dict(options or {}),
            "rates": dataclasses.asdict(
                Rates(gpu.flops_16bit, gpu.flops_f32, gpu.bandwidth, rates_of(gpu).codec)
            ),
        }
        return self._pool.submit(lambda: Compiled(**self._compile(header, exported)["compiled"]))

    def explain(self, exported: bytes, *, donated: tuple[int, ...] = ()) -> tuple[Compiled, Peak]:
        """Compiles what `export_flat` made, without estimates or options, and reads what its
        buffers hold.
        """
        header = {
            "target_config": target_config(self._gpu),
            "devices": self.target.devices,
            "donated": list(donated),
            "explain": True,
        }
        answer = self._pool.submit(self._compile, header, exported).result()
        return Compiled(**answer["compiled"]), Peak.of(answer["peak"])

    def _compile(self, header: dict, exported: bytes) -> dict:
        child = getattr(self._own, "child", None) or self._start()
        answer = child.ask(header, exported)
        if answer is None:
            self._own.child = None
            self._children.discard(child)
            raise TargetError(f"compiling for `target` {str(self.target)!r}: {child.obituary()}")
        if "error" in answer:
            raise self._error(answer["error"])
        return answer

    def _start(self) -> "_Child":
        child = self._own.child = _Child()
        self._children.add(child)
        if self._closed:  # closed while it was starting: nobody else will end it
            child.kill()
        return child

    def _error(self, message: str) -> Exception:
        if any(sign in message for sign in _ASSEMBLER_MISSING):
            return TargetError(
                f"`target` {str(self.target)!r}: XLA found no CUDA 13 assembler (ptxas and"
                " libdevice). "
                "Install CUDA 13, or its two wheels:"
                f" {install_command('nvidia-cuda-nvcc', 'nvidia-nvvm')}"
            )
        lines = message.strip().splitlines()
        return StepError(
            f"XLA could not compile the step for `target` {str(self.target)!r}: "
            + "\n".join(lines[:20])
        )


class _Child:
    """One compiling process and the pipes to it."""

    def __init__(self):
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 obituary() closes it
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxmem._xla.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=child_environment(os.environ),
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        self._to: Any = self._process.stdin
        self._from: Any = self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, header: dict, payload: bytes) -> dict | None:
        """The answer, or None where the process has ended."""
        try:
            write_message(self._to, header, payload)
            message = read_message(self._from)
        except (OSError, ValueError):
            message = None
        return None if message is None else message[0]

    def kill(self) -> None:
        self._process.kill()

    def obituary(self) -> str:
        """Waits for the process to end, frees its pipes, and says how it ended."""
        for pipe in (self._from, self._to):
            with contextlib.suppress(OSError):  # what was not sent cannot be any more
                pipe.close()
        code = self._process.wait()
        how = (
            f"was ended by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with status {code}"
        )
        advice = "; the machine may be out of memory" if code == -signal.SIGKILL else ""
        with self._stderr as stderr:
            stderr.seek(0)
            lines = [
                line for line in stderr.read().decode(errors="replace").splitlines() if line.strip()
            ]
        return f"the compiling process {how}{advice}. Its last words:\n" + "\n".join(lines[-12:])


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: no accelerator, none of the user's XLA flags but CUDA's place, and
    these very packages.
    """
    flags = [
        f
        for f in environment.get("XLA_FLAGS", "").split()
        if f.startswith("--xla_gpu_cuda_data_dir")
    ]
    here = [
        str(pathlib.Path(package.__file__).absolute().parent.parent)
        for package in (jaxmem, jaxmem_kernels)
    ]
    path = [
        *dict.fromkeys(here),
        *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    own = {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # it is written here, but never hit
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": " ".join(flags),
        "PYTHONPATH": os.pathsep.join(path),
    }
    return dict(environment) | own


def require_wheels(target: str) -> None:
    """Raises TargetError, with the command that helps, unless the CUDA plugin of jax's own version
    is installed.
    """
    wanted = installed("jax")
    found = {name: installed(name) for name in ("jaxlib", *_PLUGIN_WHEELS)}
    if all(version == wanted for version in found.values()):
        return
    got = ", ".join(
        f"{name} {version or 'missing'}" for name, version in found.items() if version != wanted
    )
    command = install_command(*(f"{name}=={wanted}" for name in _PLUGIN_WHEELS))
    raise TargetError(
        f"`target` {target!r} is compiled for by XLA's CUDA plugin, which must be of jax's own"
        " version, "
        f"{wanted}; got {got}. Install it (no GPU and no driver are needed): {command}, "
        "or pip install 'jaxmem[deviceless]'"
    )


def install_command(*wheels: str) -> str:
    return f"pip install --no-deps {' '.join(wheels)}"

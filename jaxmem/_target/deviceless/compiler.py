"""Compiles steps for a device that is not there, in child processes with an environment of their
own.
"""

import concurrent.futures
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmem._target.buffers.held_buffers import Peak
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.deviceless import gpu, tpu
from jaxmem._target.deviceless.process import Process
from jaxmem._target.deviceless.wheels import install_command, require_wheels
from jaxmem._target.devices.target import Target
from jaxmem.errors import StepError, TargetError

# What XLA's messages say where it finds no assembler, or not its library.
_ASSEMBLER_MISSING = (
    "No PTX compilation provider",
    "libdevice not found",
    "ptxas not found",
    "Couldn't find a suitable version of ptxas",
)


class Compiler:
    """Compiles exported steps for a named device, in child processes. Use it in a `with` statement.

    Each thread of the pool has a process of its own, which starts with the thread's first step and
    ends with the statement, or with this process. A process that dies fails the step that it was
    compiling; the next step starts another.

    target: a GPU's or a TPU's name, or such a `Target`.
    workers: how many steps are compiled at once.

    Raises:
      TargetError: `target` is `local`, or the wheels that compiling needs are not there.
    """

    def __init__(self, target: "str | Target", *, workers: int = 2):
        self.target = Target.parse(target)
        if self.target.local:
            raise TargetError(
                f"`target` is {str(self.target)!r}: only a named GPU or TPU is compiled for without"
                " a device; expected a name such as 'h200' or 'v5e'"
            )
        require_wheels(self.target)
        self._device = _described(self.target)
        self._pool = concurrent.futures.ThreadPoolExecutor(workers, "jaxmem-compile")
        self._own = threading.local()  # .child: the thread's process
        self._children: set[Process] = set()  # processes of all threads, for `close`
        self._closed = False

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes, and with them the compiles that have not ended."""
        # First no step may start any more. Then threads that wait for an answer are freed by the
        # end of their processes, and only then is it safe to wait for the threads.
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
        options: Mapping[str, bool | int | str] | None = None,
        assigned: bool = False,
        kernels: Sequence[tuple] = (),
        free: bool = False,
    ) -> "concurrent.futures.Future[Compiled]":
        """Compiles the result of `export_flat`, and returns a future of its facts: for TPUs and
        some GPUs (`Gpu.has_xla_estimates`) with an estimate of time.

        exported: the serialized step.
        donated: the flat indices of the donated arguments.
        options: XLA's own compile options.
        assigned: for a TPU, whether to end once buffers are assigned, and generate no code.
        kernels: for a TPU, the work of the step's Pallas kernels (`kernel_flops`).
        free: whether XLA divides the arguments without a sharding as it likes; else they are whole
          on every device.

        The future raises StepError where XLA refuses the step, or gives up on it with its process;
        TargetError where the process fails otherwise.
        """
        asked = {"assigned": assigned, "kernels": list(kernels), "free": free}
        answer = lambda: self._compile(exported, donated, options, **asked)
        return self._pool.submit(lambda: Compiled(**answer()["compiled"]))

    def explain(
        self,
        exported: bytes,
        *,
        donated: tuple[int, ...] = (),
        options: Mapping[str, bool | int | str] | None = None,
    ) -> tuple[Compiled, Peak]:
        """Compiles the result of `export_flat` without estimates, and returns its facts and its
        buffers.
        """
        answer = self._pool.submit(self._compile, exported, donated, options, explain=True).result()
        return Compiled(**answer["compiled"]), Peak.of(answer["peak"])

    def _compile(
        self, exported: bytes, donated: tuple[int, ...], options: Mapping | None, **asked: Any
    ) -> dict:
        """Asks this thread's process, and returns its answer. Raises as the future of `submit`.

        asked: the other fields of the request.
        """
        given = {"device": self._device, "donated": list(donated), "options": dict(options or {})}
        child = getattr(self._own, "child", None) or self._start()
        answer = child.ask(given | asked, exported)
        if answer is None:  # it died: forget it, so that the next step starts another
            self._own.child = None
            self._children.discard(child)
            words = f"compiling for `target` {str(self.target)!r}: {child.obituary()}"
            # A compiler that gave up on a step may well compile another.
            raise StepError(words) if child.gave_up else TargetError(words)
        if "error" in answer:
            raise self._error(answer["error"])
        return answer

    def _start(self) -> "Process":
        """Starts a child process for this thread."""
        child = self._own.child = Process()
        self._children.add(child)
        if self._closed:  # closed while it was starting: nobody else will end it
            child.kill()
        return child

    def _error(self, message: str) -> Exception:
        """The error for a step that XLA did not compile, by the text of XLA's error."""
        if any(sign in message for sign in _ASSEMBLER_MISSING):
            return TargetError(
                f"`target` {str(self.target)!r}: XLA found no CUDA 13 assembler (ptxas and"
                " libdevice). Install CUDA 13, or its two wheels:"
                f" {install_command('nvidia-cuda-nvcc', 'nvidia-nvvm')}"
            )
        lines = message.strip().splitlines()
        return StepError(
            f"XLA could not compile the step for `target` {str(self.target)!r}: "
            + "\n".join(lines[:20])
        )


def _described(target: Target) -> dict:
    """The description of the device that a compiling process gets."""
    if target.topology is not None:
        return tpu.described(target.topology)
    assert target.gpu is not None  # it is named, and no TPU
    return gpu.described(target, target.gpu)

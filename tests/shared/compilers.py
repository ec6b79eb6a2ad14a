"""Compiling processes that outlive their compilers, for the next test.

A process takes most of a second of a core to start, and assembling a GPU's kernels takes half of a
small step's compile. So when a compiler is closed, its idle processes wait for another compiler
with the same target and environment, and each process assembles a kernel only once. Programs, bytes
and estimates do not change (tests/compile/test_quick_compiles.py).
"""

import json
import os
import pathlib
import threading

import pytest

from jaxmem._target.deviceless import compiler as deviceless
from jaxmem._target.deviceless import process

Process, child_environment = process.Process, process.child_environment
MOST = 3  # number of waiting processes; further processes are ended
OF_TESTS = "PYTEST_CURRENT_TEST", "XDG_CACHE_HOME"  # variables that compiling does not read


class Pool:
    """The waiting processes, in the order in which they began to wait."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self._started = folder, 0
        self._waiting: list[tuple[object, Process]] = []
        self._lock = threading.Lock()

    def take(self, key: object) -> Process:
        """Returns the process that began to wait last, whatever other tests ran before."""
        with self._lock:
            for i in reversed(range(len(self._waiting))):
                if self._waiting[i][0] == key:
                    return self._waiting.pop(i)[1]
        return Process()

    def give_back(self, key: object, one: Process) -> None:
        with self._lock:
            self._waiting.append((key, one))
        self.end_all_but(MOST)

    def end_all_but(self, count: int) -> None:
        with self._lock:
            ending = self._waiting[: max(0, len(self._waiting) - count)]
            del self._waiting[: len(ending)]
        for _, one in ending:
            one.kill()
            one.obituary()

    def environment(self, environment) -> dict[str, str]:
        """Returns the environment of a process, with a file of its own for assembled kernels."""
        found = child_environment(environment)
        with self._lock:
            self._started += 1
            file = self._folder / str(self._started)
        return found | {"XLA_FLAGS": f"{found['XLA_FLAGS']} --xla_gpu_kernel_cache_file={file}"}

    def lend(self) -> "Lent":
        return Lent(self)


class Lent:
    """Replaces the `Process` of a `Compiler` by a process of the pool. The first request names the
    target, and so selects the process.
    """

    def __init__(self, pool: Pool):
        self._pool, self._key = pool, None
        self._process: Process | None = None
        self._lock, self._busy = threading.Lock(), False
        self._closed, self._broken, self.gave_up = False, False, False

    @property
    def pid(self) -> int | None:
        return self._process and self._process.pid

    def ask(self, header: dict, payload: bytes) -> dict | None:
        with self._lock:
            if self._closed:
                return None
            self._busy = True
        if self._process is None:
            own = child_environment(os.environ).items()
            environment = frozenset((k, v) for k, v in own if k not in OF_TESTS)
            self._key = json.dumps(header["device"]), environment
            one = self._pool.take(self._key)
            with self._lock:
                self._process = one
                if self._closed:
                    one.kill()
        answer = self._process.ask(header, payload)
        with self._lock:
            self._busy, self._broken = False, self._broken or answer is None
        return answer

    def kill(self) -> None:
        with self._lock:
            self._closed = True
            self._broken = self._broken or self._busy
            if self._broken and self._process is not None:
                self._process.kill()

    def obituary(self) -> str:
        one, self._process = self._process, None
        if one is None:
            return "the compiling process was not started"
        if self._broken:
            said, self.gave_up = one.obituary(), one.gave_up
            return said
        self._pool.give_back(self._key, one)
        return ""


def share(patch: pytest.MonkeyPatch, folder: pathlib.Path) -> Pool:
    """Makes compilers take their processes from a pool, with assembled kernels in `folder`."""
    pool = Pool(folder)
    patch.setattr(deviceless, "Process", pool.lend)
    patch.setattr(process, "child_environment", pool.environment)
    return pool


def start_alone(patch: pytest.MonkeyPatch) -> None:
    """Makes each compiler start and end its own processes, as for users."""
    patch.setattr(deviceless, "Process", Process)
    patch.setattr(process, "child_environment", child_environment)

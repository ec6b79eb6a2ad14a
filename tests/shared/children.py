"""Processes that tests start for absent devices, and the environments of these processes."""

import atexit
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

from tests.shared import emitters

WORKER = "tests.shared.worker"


def finding_packages() -> dict[str, str]:
    """Returns this process's environment, with its import paths."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def with_cpus(devices: int) -> dict[str, str]:
    """Returns an environment with `devices` CPU devices, which compiles quickly and runs slowly."""
    count = f"--xla_force_host_platform_device_count={devices}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {count} {emitters.OLDER}"
    own = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return finding_packages() | own | {"XLA_FLAGS": flags}


def as_users_have(environment: dict[str, str]) -> dict[str, str]:
    """Returns the environment with XLA's default emitters and all of LLVM's passes, for a test that
    compares bits.
    """
    flags = environment["XLA_FLAGS"].replace(emitters.OLDER, "")
    own = {k: v for k, v in environment.items() if k != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    return own | {"XLA_FLAGS": flags}


def python(*line, environment: dict[str, str] | None = None, check: bool = True):
    """Runs Python with the arguments `line` to its end, and returns the `CompletedProcess`.

    environment: by default, this process's environment with its import paths.
    check: whether an exit code other than 0 is an error.
    """
    command = [sys.executable, *map(str, line)]
    environment = environment or finding_packages()
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=check)


class Worker:
    """A process that imports JAX once, and runs one program after another."""

    def __init__(self, environment: dict[str, str]):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (`end` closes it)
        self._process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        atexit.register(self.end)

    def end(self) -> None:
        atexit.unregister(self.end)
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def run(self, environment: dict[str, str], module: str, *arguments) -> str:
        """Returns the output of a module with these arguments."""
        program = {"module": module, "arguments": [*map(str, arguments)]}
        text = json.dumps(program | {"environment": environment})
        print(text, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise AssertionError(f"{module} ended its process: {self._errors.read()[-3000:]}")
        answer = json.loads(line)
        assert "error" not in answer, answer["error"][-3000:]
        return answer["printed"]


WORKERS: dict[frozenset, Worker] = {}
MOST = 2  # number of waiting processes, each of which may take a gigabyte


def text(environment: dict[str, str], module: str, *arguments) -> str:
    """Returns the output of a module with these arguments, in a process with this environment.

    Programs share a process if their devices and compiler settings are equal, since JAX reads these
    settings at import.
    """
    settings = frozenset((k, v) for k, v in environment.items() if k.startswith(("JAX_", "XLA_")))
    worker = WORKERS.pop(settings, None) or Worker(environment)
    while len(WORKERS) >= MOST:
        WORKERS.pop(next(iter(WORKERS))).end()  # the process that has waited longest
    try:
        printed = worker.run(environment, module, *arguments)
    except BaseException:
        worker.end()
        raise
    WORKERS[settings] = worker
    return printed


def rows(environment: dict[str, str], module: str, *arguments) -> list[dict]:
    """Returns the output of a module, parsed from lines of JSON."""
    return [json.loads(line) for line in text(environment, module, *arguments).splitlines()]


def printed(environment: dict[str, str], module: str, *arguments) -> dict:
    """Returns the last row of a module's output."""
    return rows(environment, module, *arguments)[-1]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def two(environment: dict[str, str], seconds: float, *program, each=((), ())) -> list[dict]:
    """Returns the last row of each of two processes of one run. If one process fails, or if the
    time ends, both are ended, since the other process would wait.

    program: a module and its arguments. Each process also gets its number, the number of processes,
      the coordinator's port, and its own arguments in `each`.
    """
    port = free_port()
    line = lambda number, own: map(str, (*program, number, len(each), port, *own))
    with tempfile.TemporaryFile("w+") as errors:
        running = [
            subprocess.Popen(
                [sys.executable, "-m", WORKER, *line(number, own)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
            for number, own in enumerate(each)
        ]
        try:
            end = time.monotonic() + seconds
            while any(process.poll() is None for process in running):
                late = time.monotonic() > end
                if late or any(process.poll() for process in running):
                    break
                time.sleep(0.05)
        finally:
            for process in running:
                process.kill()
        outputs = [process.communicate()[0] for process in running]
        errors.seek(0)
        codes = [process.returncode for process in running]
        assert not any(codes), f"{codes} after at most {seconds} s: {errors.read()[-3000:]}"
    return [json.loads(output.splitlines()[-1]) for output in outputs]

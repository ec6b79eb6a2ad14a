"""One compiling process: its environment, the pipes to it, and its last words."""

import contextlib
import os
import pathlib
import re
import signal
import site
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import jaxmem
import jaxmem_kernels
from jaxmem._core.quiet import LIBTPU
from jaxmem._target.deviceless.wire import read_message, write_message

_OF_A_TPU = ("TPU_", "CLOUD_TPU_", "MEGASCALE_")  # begins variables that a TPU's machine sets
_FATAL = re.compile(r"F\d{4} \d\d:\d\d:\d\d")  # how a line of it begins


class Process:
    """One compiling process and the pipes to it.

    pid: the process's number.
    gave_up: whether the process ended itself, as XLA does where it finds itself at fault. Known
      after `obituary`.
    """

    def __init__(self):
        # A file and not a pipe, which nobody would read in time: a full one blocks the process.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 obituary() closes it
        # What is dumped there goes with the process, however that ends.
        self._folder = tempfile.TemporaryDirectory(prefix="jaxmem-")
        self._process = subprocess.Popen(
            # -P: no file of the user's working folder is taken for a module.
            [sys.executable, "-P", "-m", "jaxmem._target.deviceless.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=child_environment(os.environ) | {"TMPDIR": self._folder.name},
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        self.pid, self.gave_up = self._process.pid, False
        self._to: Any = self._process.stdin
        self._from: Any = self._process.stdout

    def ask(self, header: dict, payload: bytes) -> dict | None:
        """Sends a request and returns its answer, or None where the process has ended."""
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
            with contextlib.suppress(OSError):  # closing sends the rest, and nobody reads it
                pipe.close()
        code = self._process.wait()
        self._folder.cleanup()
        how = f"ended with status {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        advice = "; the machine may be out of memory" if code == -signal.SIGKILL else ""
        with self._stderr as stderr:
            stderr.seek(0)
            said = stderr.read().decode(errors="replace").splitlines()
        lines = [line for line in said if line.strip()]
        # XLA's own fatal error is what helps; after it come a stack without names and other noise.
        fatal = [line for line in lines if _FATAL.match(line)]
        # Where there is none, memory may have been short.
        self.gave_up = code == -signal.SIGABRT and bool(fatal)
        return f"the compiling process {how}{advice}. Its last words:\n" + "\n".join(
            fatal[:1] or lines[-12:]
        )


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the child's environment.

    It has no accelerator, no XLA flag of the user's but CUDA's folder, and the very packages that
    run here, wherever they were imported from. What a TPU's own machine says of itself (its slice,
    its neighbours) is left out; where libtpu lies, and the flags for libtpu, stay.
    """
    all_flags = environment.get("XLA_FLAGS", "").split()
    flags = [f for f in all_flags if f.startswith("--xla_gpu_cuda_data_dir")]
    # An installed package is found without its folder. With the folder, an installed `dataclasses`,
    # for example, would take the place of Python's own.
    installed = {*site.getsitepackages(), site.getusersitepackages()}
    folders = [str(pathlib.Path(p.__path__[0]).absolute().parent) for p in (jaxmem, jaxmem_kernels)]
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    path = [*dict.fromkeys(f for f in folders if f not in installed), *filter(None, given)]
    own = {
        "JAX_PLATFORMS": "cpu",
        "TPU_LOG_DIR": "disabled",  # no logs in a folder that all users share
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # it is written here, but never hit
        "JAX_ENABLE_X64": "1",  # a step's 64-bit arguments stay 64-bit
        "XLA_FLAGS": " ".join(flags),
        "PYTHONPATH": os.pathsep.join(path),
    }
    stays = lambda name: not name.startswith(_OF_A_TPU) or name == "TPU_LIBRARY_PATH"
    kept = {name: value for name, value in environment.items() if stays(name)}
    return kept | LIBTPU | own

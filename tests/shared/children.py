"""Environments of the processes that tests start for devices which they have not."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import jax

# XLA's earlier emitters compile in half of the time, on the versions that still have them.
EMITTERS = " --xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""


def finding_packages() -> dict[str, str]:
    """This process's environment, with all that it imports from."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def with_cpus(devices: int) -> dict[str, str]:
    """The environment of as many CPU devices, whose programs compile quickly and run slowly."""
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        f"{EMITTERS}"
    )
    return finding_packages() | {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }


def as_users_have(environment: dict[str, str]) -> dict[str, str]:
    """The environment of programs that are compiled with all of LLVM's passes, for a test that
    compares bits. A program on jaxlib 0.10 also asks for the usual way to make code of fusions.
    """
    return {k: v for k, v in environment.items() if k != "JAX_DISABLE_MOST_OPTIMIZATIONS"}


def printed(environment: dict[str, str], *command) -> dict:
    """What a module prints last, as JSON, that is run with these arguments."""
    run = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def together(commands: Sequence[Sequence], environment: dict[str, str], seconds: float):
    """What commands print that run side by side, a text for each. As soon as one fails, or when the
    time is over, all are ended: the others would wait for it.
    """
    with tempfile.TemporaryFile("w+") as errors:
        running = [
            subprocess.Popen(
                [*map(str, command)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
            for command in commands
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
        printed = [process.communicate()[0] for process in running]
        errors.seek(0)
        codes = [process.returncode for process in running]
        assert not any(codes), f"{codes} after at most {seconds} s: {errors.read()[-3000:]}"
    return printed

"""AdamA over a mesh: eight devices, and two processes, equal to one device; collectives that accumulation does not add to."""

import json
import os
import socket
import subprocess
import sys

import pytest


def environment(devices: int) -> dict[str, str]:
    return os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def outputs(devices: int, *arguments: tuple) -> list[dict]:
    """What the processes print, one for each of `arguments`."""
    command = [sys.executable, "-m", "tests.sharded_adama"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment(devices)}
    running = [subprocess.Popen([*command, *map(str, own)], **pipes) for own in arguments]
    done = [(process, *process.communicate(timeout=500)) for process in running]
    for process, _, err in done:
        assert process.returncode == 0, err[-3000:]
    return [json.loads(out.splitlines()[-1]) for _, out, _ in done]


def test_eight_devices_are_one_with_eight_times_as_many_microbatches():
    (got,) = outputs(8, ())
    assert got["devices"] == 8
    assert len(got["found"]) == 9
    assert got["found"] == pytest.approx(dict.fromkeys(got["found"], 0.0), abs=1e-12)


def test_two_processes_are_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for got in outputs(2, (0, 2, port), (1, 2, port)):
        assert got["devices"] == 4
        assert len(got["found"]) == 6
        assert got["found"] == pytest.approx(dict.fromkeys(got["found"], 0.0), abs=1e-12)

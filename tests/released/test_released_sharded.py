"""AdamA over a mesh: eight devices, and two processes, equal to one device; collectives that
accumulation does not add to.
"""

import json
import pathlib
import socket
import subprocess
import sys

import pytest

from jaxmem._target.deviceless.process import child_environment
from tests.shared import children, tiny_lm

PROGRAM = "tests.programs.sharded_adama"


def test_eight_devices_are_one_with_eight_times_as_many_microbatches():
    got = children.printed(children.with_cpus(8), PROGRAM)
    assert got["devices"] == 8
    assert len(got["found"]) == 18
    assert got["found"] == pytest.approx(dict.fromkeys(got["found"], 0.0), abs=1e-12)


@pytest.mark.slow
def test_two_processes_are_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    programs = [(PROGRAM, process, 2, port) for process in range(2)]
    for text in children.together(programs, children.with_cpus(2), 500):
        got = json.loads(text.splitlines()[-1])
        assert got["devices"] == 4
        assert len(got["found"]) == 10
        assert got["found"] == pytest.approx(dict.fromkeys(got["found"], 0.0), abs=1e-12)


def collectives(devices: int, kernels: pathlib.Path) -> dict[str, dict[str, int]]:
    """What a step for absent GPUs executes, by "devices divided microbatches"."""
    command = [sys.executable, "-m", "tests.programs.deviceless_adama", str(devices)]
    # Kernels that programs share are assembled only once.
    flags = f"--xla_gpu_kernel_cache_file={kernels}"
    run = subprocess.run(
        command,
        env=child_environment(children.finding_packages()) | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("devices", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_microbatches_add_no_collective_unless_moments_are_divided(devices, tmp_path):
    found = collectives(devices, tmp_path / "kernels")
    once = {"all-reduce": 1, "reduce-scatter": 0, "all-gather": 0}
    assert found[f"{devices} nothing 2"] == found[f"{devices} nothing 8"] == once
    components = (
        tiny_lm.LAYERS + 2
    )  # each layer's two arrays in one; embedding and scale; the last is the head's
    for n in (2, 8):
        divided = found[f"{devices} moments {n}"]
        assert divided["reduce-scatter"] == n * components
        assert divided["all-gather"] <= tiny_lm.LAYERS + 3
        assert divided["all-reduce"] <= n * components + 2, "scalars: each component's norm"

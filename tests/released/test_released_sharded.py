"""AdamA over a mesh: eight devices, and two processes, equal to one device; collectives that
accumulation does not add to.
"""

import pathlib

import pytest

from jaxmem._target.deviceless.process import child_environment
from tests.shared import children, tiny_lm
from tests.shared.marks import slow

PROGRAM = "tests.programs.sharded_adama"


@pytest.mark.parametrize(("how", "count"), [(("some",), 7), slow((), 18)], ids=["some", "every"])
def test_eight_devices_are_one_with_eight_times_as_many_microbatches(how, count):
    got = children.printed(children.with_cpus(8), PROGRAM, *how)
    assert got["devices"] == 8
    assert len(got["found"]) == count
    assert got["found"] == pytest.approx(dict.fromkeys(got["found"], 0.0), abs=1e-12)


@pytest.mark.slow
def test_two_processes_are_one():
    for got in children.two(children.with_cpus(2), 500, PROGRAM):
        assert got["devices"] == 4
        assert len(got["found"]) == 10
        assert got["found"] == pytest.approx(dict.fromkeys(got["found"], 0.0), abs=1e-12)


def collectives(devices: int, kernels: pathlib.Path) -> dict[str, dict[str, int]]:
    """What a step for absent GPUs executes, by "devices divided microbatches"."""
    # Kernels that programs share are assembled only once.
    flags = f"--xla_gpu_kernel_cache_file={kernels}"
    environment = child_environment(children.finding_packages()) | {"XLA_FLAGS": flags}
    return children.printed(environment, "tests.programs.deviceless_adama", devices)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 64])
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

"""How a process of a run finds the others."""

import argparse
import signal

import jax
import pytest
from jax.experimental import multihost_utils

from experiments.command import processes
from experiments.command.address import Address, address, options
from experiments.errors import InputError
from tests.shared import children


def parsed(*line):
    parser = argparse.ArgumentParser()
    options(parser)
    return parser.parse_args(line)


SLURM = {
    "SLURM_JOB_ID": "70000",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[007-010,012],other",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
OMPI_6 = OMPI | {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b,2620:10d::2]:43370"}
OMPI_4 = OMPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
GKE = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}
SLICES = {
    "MEGASCALE_COORDINATOR_ADDRESS": "first:8080",
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
}
JOBSET = {
    "JOBSET_PROCESSES": "2",
    "JOBSET_NAME": "gpt",
    "REPLICATED_JOB_NAME": "hosts",
    "JOB_COMPLETION_INDEX": "1",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        (SLURM, Address("gpu007:61808", 16, 3, 1, 60)),
        (SLURM | {"SLURM_STEP_NODELIST": "a"}, Address("a:61808", 16, 3, 1, 60)),
        (SLURM | {"SLURM_STEP_NODELIST": "a,b[1-2]"}, Address("a:61808", 16, 3, 1, 60)),
        (SLURM | {"SLURM_STEP_NODELIST": "a[07,9]"}, Address("a07:61808", 16, 3, 1, 60)),
        (SLURM | {"JAX_COORDINATOR_PORT": "9"}, Address("gpu007:9", 16, 3, 1, 60)),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, Address("gpu007:61808", 16, 3, None, 60)),
        (OMPI_4, Address("10.96.0.1:62624", 4, 3, 1, 60)),
        (OMPI_6, Address("fe80::b9b:62880", 4, 3, 1, 60)),
        (OMPI | {"JAX_COORDINATOR_ADDRESS": "a:1"}, Address("a:1", 4, 3, 1, 60)),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        (GKE, Address("a:8482", 2, 1, None, 600)),
        (GKE | SLICES, Address("first:8482", 6, 5, None, 600)),
        (JOBSET, Address("gpt-hosts-0-0.gpt:55527", 2, 1, None, 600)),
    ],
)
def test_a_launcher_is_known_by_its_variables(environment, expected):
    assert address(parsed(), environment) == expected


@pytest.mark.slow
@pytest.mark.parametrize("environment", [SLURM, OMPI_4, OMPI_6], ids=["Slurm", "tcp", "tcp6"])
def test_the_place_is_the_one_that_jax_detects(environment):
    """JAX logs the address and the device before it connects, which fails here."""
    found = address(parsed(), environment)
    line = "import jax; jax.distributed.initialize(initialization_timeout=1)"
    own = children.finding_packages() | environment | {"JAX_LOGGING_LEVEL": "INFO"}
    said = children.python("-c", line, environment=own, check=False).stderr
    assert f"Connecting to JAX distributed service on {found.coordinator}\n" in said
    assert f"visible devices: {found.local}\n" in said


def test_the_command_line_comes_first():
    given = parsed("--coordinator", "localhost:5", "--processes", "2", "--process", "0")
    assert address(given, JOBSET) == Address("localhost:5", 2, 0)
    assert address(given, SLURM) == Address("localhost:5", 2, 0, 1)


@pytest.mark.parametrize("environment", [{}, SLURM, JOBSET])
def test_the_wait_for_the_others_is_an_option(environment):
    given = ("--coordinator", "localhost:5", "--processes", "2", "--process", "0")
    line = () if environment else given
    assert address(parsed(*line, "--wait", "7.5"), environment).wait == 7.5
    with pytest.raises(InputError, match="--wait: got 0; allowed: seconds, more than 0"):
        address(parsed(*line, "--wait", "0"), environment)


@pytest.mark.parametrize("coordinator", ["localhost", ":5", "localhost:", "localhost:a"])
def test_an_address_without_a_host_or_a_port_is_refused(coordinator):
    line = "--coordinator", coordinator, "--processes", "2", "--process", "0"
    with pytest.raises(InputError, match="--coordinator: got .*; allowed: a host and a port"):
        address(parsed(*line), {})


@pytest.mark.parametrize(
    "line",
    [
        ["--processes", "2"],
        ["--coordinator", "a:1", "--processes", "2", "--process", "2"],
        ["--coordinator", "a:1", "--processes", "2", "--process", "-1"],
    ],
)
def test_a_place_that_is_not_whole_is_refused(line):
    with pytest.raises(InputError, match="--process: got .*; allowed: all three"):
        address(parsed(*line), {})


def test_open_mpi_5_needs_an_address():
    with pytest.raises(InputError, match="4 processes of Open MPI without JAX_COORDINATOR_ADDRESS"):
        address(parsed(), OMPI)


def test_a_preemption_that_jax_announces_ends_a_run_as_sigterm_does(monkeypatch):
    heard = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: step == 3)
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        batch = processes.heed_preemption(lambda number: 10 * number)
        assert [batch(2), heard] == [20, []]
        assert [batch(3), heard] == [30, [signal.SIGTERM]]
    finally:
        signal.signal(signal.SIGTERM, before)

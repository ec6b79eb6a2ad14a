"""How a process of a run finds the others."""

import argparse
import signal

import jax
import pytest
from jax.experimental import multihost_utils

from experiments.command import processes
from experiments.command.processes import Address, address
from experiments.errors import InputError


def parsed(*line):
    parser = argparse.ArgumentParser()
    processes.options(parser)
    return parser.parse_args(line)


OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
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
        ({"SLURM_STEP_NUM_TASKS": "16"}, Address(None, None, None)),
        (OMPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}, Address(None, None, None)),
        (OMPI | {"JAX_COORDINATOR_ADDRESS": "a:1"}, Address("a:1", 4, 3)),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, Address(None, None, None)),
        (JOBSET, Address("gpt-hosts-0-0.gpt:55527", 2, 1)),
    ],
)
def test_a_launcher_is_known_by_its_variables(environment, expected):
    assert address(parsed(), environment) == expected


def test_the_command_line_comes_first():
    given = parsed("--coordinator", "localhost:5", "--processes", "2", "--process", "0")
    assert address(given, JOBSET) == Address("localhost:5", 2, 0)


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

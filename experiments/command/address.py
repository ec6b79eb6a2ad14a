"""The place of a process among the processes of a run: by the command line, or by the variables of
Slurm, Open MPI, GKE or a Kubernetes JobSet.

The addresses and ports equal those that JAX detects itself. They are read here, since the processes
first wait for each other at this address (`meeting.py`), and JAX does not tell what it detects. JAX
also needs mpi4py for Open MPI 5, and for a JobSet the Python client of Kubernetes with rights to
list pods (`experiments/launch/jobset.yaml` sets variables instead).
"""

import argparse
import dataclasses
import re
from collections.abc import Mapping

from experiments.errors import InputError

PORT = 55527  # of the coordinator in a JobSet
TPU_PORT = 8482
AT_ONCE, APART = 60.0, 600.0  # seconds


@dataclasses.dataclass(frozen=True)
class Address:
    """`coordinator`: host and port of process 0. `local`: the number of the process on its host,
    which selects its GPU; None for all devices of the host.
    `wait`: seconds to wait for the other processes. A launcher that starts all processes at once
    needs fewer than a cluster that pulls images and adds hosts.
    """

    coordinator: str
    count: int
    number: int
    local: int | None = None
    wait: float = AT_ONCE


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a run in several processes to a command line."""
    told = "; by default as Slurm, Open MPI, GKE or a JobSet say"
    parser.add_argument("--coordinator", metavar="HOST:PORT", help=f"address of process 0{told}")
    parser.add_argument("--processes", type=int, help=f"number of processes{told}")
    parser.add_argument("--process", type=int, help=f"number of this process, from 0{told}")
    parser.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help=f"how long to wait for the other processes to start (default: {AT_ONCE:g};"
        f" {APART:g} on GKE and in a JobSet)",
    )


def address(args: argparse.Namespace, environment: Mapping[str, str]) -> Address | None:
    """Returns the place of this process by the command line, or by the variables of a launcher.
    None for a run in one process.
    """
    if args.wait is not None and not args.wait > 0:
        raise InputError(f"--wait: got {args.wait:g}; allowed: seconds, more than 0")
    found = _given(args, environment) or _launched(environment)
    if found is None or args.wait is None:
        return found
    return dataclasses.replace(found, wait=args.wait)


def _given(args: argparse.Namespace, environment: Mapping[str, str]) -> Address | None:
    given = args.coordinator, args.processes, args.process
    if given == (None, None, None):
        return None
    if None in given or not 0 <= args.process < args.processes:
        raise InputError(
            f"--coordinator, --processes, --process: got {given}; allowed: all three, with"
            " --process from 0 to --processes - 1"
        )
    if not re.fullmatch(r".+:\d+", args.coordinator):
        raise InputError(
            f"--coordinator: got {args.coordinator!r}; allowed: a host and a port, such as"
            f" host:{PORT}"
        )
    return Address(*given, local=_local(environment))


def _launched(environment: Mapping[str, str]) -> Address | None:
    if (count := int(environment.get("SLURM_STEP_NUM_TASKS", 1))) > 1:
        # "node1", "node1,host2", "node[001-015],host2" and "node[001,007-015]" name a first host.
        first = re.match(r"([^,\[]*)(?:\[([^,\-\]]*))?", environment["SLURM_STEP_NODELIST"])
        assert first is not None, "each part of the pattern may be empty"
        host, number = "".join(filter(None, first.groups())), int(environment["SLURM_PROCID"])
        coordinator = _at(host, _own_port(int(environment["SLURM_JOB_ID"])), environment)
        return Address(coordinator, count, number, _local(environment))
    if "," in (hosts := environment.get("TPU_WORKER_HOSTNAMES", "")):
        return _of_slices(hosts.split(","), environment)
    if (count := int(environment.get("OMPI_COMM_WORLD_SIZE", 1))) > 1:
        coordinator = _of_mpi(count, environment)
        number = int(environment["OMPI_COMM_WORLD_RANK"])
        return Address(coordinator, count, number, _local(environment))
    if (count := int(environment.get("JOBSET_PROCESSES", 1))) > 1:
        name, job = environment["JOBSET_NAME"], environment["REPLICATED_JOB_NAME"]
        coordinator = f"{name}-{job}-0-0.{name}:{PORT}"
        return Address(coordinator, count, int(environment["JOB_COMPLETION_INDEX"]), wait=APART)
    return None


def _of_slices(hosts: list[str], environment: Mapping[str, str]) -> Address:
    """Returns the place of a host among the hosts of one TPU slice, or of several equal slices."""
    slices = int(environment.get("MEGASCALE_NUM_SLICES") or 1)
    number = int(environment.get("MEGASCALE_SLICE_ID") or 0) * len(hosts)
    first = environment.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0]
    return Address(
        _at(first.split(":")[0], TPU_PORT, environment),
        len(hosts) * slices,
        number + int(environment["TPU_WORKER_ID"]),
        wait=APART,
    )


def _of_mpi(count: int, environment: Mapping[str, str]) -> str:
    """Returns the address of process 0: of the launcher's host under Open MPI 4. Open MPI 5 does
    not tell it.
    """
    if (given := environment.get("JAX_COORDINATOR_ADDRESS")) is not None:
        return given
    launcher = environment.get("OMPI_MCA_orte_hnp_uri", "")
    # Such as 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, or tcp6://[fe80::1,2620::2]:43370.
    hosts = re.match(r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", launcher)
    if hosts is None:
        raise InputError(
            f"got {count} processes of Open MPI without JAX_COORDINATOR_ADDRESS; allowed: the"
            " host of process 0 and a free port, as in `mpirun -x"
            f" JAX_COORDINATOR_ADDRESS=host:{PORT}`"
        )
    job, *host = hosts.groups()
    port = _own_port(int(job) // 2**12)  # the numbers of jobs are multiples of 2^12
    return _at("".join(filter(None, host)), port, environment)


def _own_port(job: int) -> int:
    """Returns a port for a job, among the last 2^12."""
    return 2**16 - 2**12 + job % 2**12


def _at(host: str, port: int, environment: Mapping[str, str]) -> str:
    """Returns the address that JAX's variables set, or else `host` and `port`."""
    port_given = environment.get("JAX_COORDINATOR_PORT") or port
    return environment.get("JAX_COORDINATOR_ADDRESS") or f"{host}:{port_given}"


def _local(environment: Mapping[str, str]) -> int | None:
    """Returns the number of a process of Slurm or Open MPI on its host. None otherwise, or if a
    variable selects the devices of each process.
    """
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    names = ("SLURM_LOCALID",) if "SLURM_STEP_NODELIST" in environment else ()
    found = (environment.get(name) for name in (*names, "OMPI_COMM_WORLD_LOCAL_RANK"))
    return next((int(number) for number in found if number is not None), None)

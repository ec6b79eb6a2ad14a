"""Several processes of one run: how they find each other, and how all end if one fails.

JAX's own detection serves under Slurm, under Open MPI 4, and on TPU slices of GKE. The variables of
Open MPI 5 and of an indexed Job in a Kubernetes JobSet (`experiments/launch/jobset.yaml`) are read
here, since JAX's detection needs a variable that Open MPI 5 no longer sets, or the Python client of
Kubernetes with rights to list pods.
"""

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental import multihost_utils

from experiments.errors import FAILED, InputError

PORT = 55527  # of the coordinator in a JobSet
HEARTBEAT = SHUTDOWN = 20  # seconds until a process that was killed is noticed
REASON = "experiments/failed"  # the coordinator's key of the first failure
HEARD = 3.0  # seconds in which every process hears of a failure


@dataclasses.dataclass(frozen=True)
class Address:
    """The place of a process among the processes of a run. JAX detects what is None."""

    coordinator: str | None
    count: int | None
    number: int | None


DETECTED = Address(None, None, None)


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a run in several processes to a command line."""
    told = "; by default as Slurm, Open MPI or a JobSet say"
    parser.add_argument("--coordinator", metavar="HOST:PORT", help=f"address of process 0{told}")
    parser.add_argument("--processes", type=int, help=f"number of processes{told}")
    parser.add_argument("--process", type=int, help=f"number of this process, from 0{told}")


def address(args: argparse.Namespace, environment: Mapping[str, str]) -> Address | None:
    """Returns the place of this process by the command line, or by the variables of a launcher.
    None for a run in one process.
    """
    given = args.coordinator, args.processes, args.process
    if given != (None, None, None):
        if None in given or not 0 <= args.process < args.processes:
            raise InputError(
                f"--coordinator, --processes, --process: got {given}; allowed: all three, with"
                " --process from 0 to --processes - 1"
            )
        return Address(*given)
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return DETECTED
    if "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return DETECTED
    if (count := int(environment.get("OMPI_COMM_WORLD_SIZE", 1))) > 1:
        if "OMPI_MCA_orte_hnp_uri" in environment:
            return DETECTED
        coordinator = environment.get("JAX_COORDINATOR_ADDRESS")
        if coordinator is None:
            raise InputError(
                f"got {count} processes of Open MPI without JAX_COORDINATOR_ADDRESS; allowed: the"
                " host of process 0 and a free port, as in `mpirun -x"
                " JAX_COORDINATOR_ADDRESS=host:55527`"
            )
        return Address(coordinator, count, int(environment["OMPI_COMM_WORLD_RANK"]))
    if (count := int(environment.get("JOBSET_PROCESSES", 1))) > 1:
        name, job = environment["JOBSET_NAME"], environment["REPLICATED_JOB_NAME"]
        coordinator = f"{name}-{job}-0-0.{name}:{PORT}"
        return Address(coordinator, count, int(environment["JOB_COMPLETION_INDEX"]))
    return None


def join(args: argparse.Namespace) -> None:
    """Joins the processes of the run, before JAX looks for devices."""
    if (found := address(args, os.environ)) is None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        found.coordinator,
        found.count,
        found.number,
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=SHUTDOWN,
    )


def heed_preemption(batch: Callable[[int], Any]) -> Callable[[int], Any]:
    """Returns `batch`, a function of a step's number, which also asks JAX's preemption service. If
    the service announces a preemption, the run ends as after SIGTERM, once this step is saved.

    `jaxmem.runs.train` itself hears SIGTERM. The service also hears notices of other kinds.
    """
    if jax.process_count() == 1:
        return batch

    def heeding(number: int) -> Any:
        if multihost_utils.reached_preemption_sync_point(number):
            signal.raise_signal(signal.SIGTERM)
        return batch(number)

    return heeding


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """While the statement runs, an error in one process ends all processes in seconds, and each
    reports the first error. Without this, the others would wait for the failed process's devices.
    """
    if jax.process_count() == 1:
        yield
        return
    client, done = _client(), threading.Event()
    watch = threading.Thread(target=_watch, args=(client, done), daemon=True)
    watch.start()
    try:
        yield
    except Exception as error:
        done.set()
        said = f"process {jax.process_index()} of {jax.process_count()}: {type(error).__name__}"
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process failed before
            client.key_value_set(REASON, f"{said}: {error}")
        traceback.print_exc()
        _end(_reason(client, 1.0) or str(error))
    finally:
        # Also after a signal: a request to the coordinator must not outlive JAX's client, which
        # would abort the process.
        done.set()
        watch.join()


def _client() -> Any:
    """The client of the coordinator. orbax knows the way to it."""
    import orbax.checkpoint

    return orbax.checkpoint.multihost.get_jax_distributed_client()


def _reason(client: Any, seconds: float) -> str | None:
    """The first failure; None if there is none in `seconds`."""
    try:
        return client.blocking_key_value_get(REASON, int(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            return f"process 0, which coordinates the run: {error}"
        return None


def _watch(client: Any, done: threading.Event) -> None:
    """Ends this process once another process has failed."""
    while not done.is_set():
        if (reason := _reason(client, 1.0)) is not None and not done.is_set():
            _end(reason)


def _end(reason: str) -> None:
    """Reports the first failure, and ends this process without its other threads. The process that
    coordinates the run ends last, so that all hear the reason.
    """
    print(f"error: the run ends, since a process failed: {reason}", file=sys.stderr, flush=True)
    if jax.process_index() == 0:
        time.sleep(HEARD)
    os._exit(FAILED)

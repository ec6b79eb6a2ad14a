"""Several processes of one run: how they join, and how all end if one fails."""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

from experiments.command.address import Address, address
from experiments.command.meeting import meet
from experiments.errors import FAILED

HEARTBEAT = SHUTDOWN = 20  # seconds until a process that was killed is noticed
CONNECTED = 30.0  # seconds in which JAX connects processes that have all started
REASON = "experiments/failed"  # the coordinator's key of the first failure
HEARD = 3.0  # seconds in which every process hears of a failure


def join(args: argparse.Namespace) -> None:
    """Joins the processes of the run, before JAX looks for devices. Raises AbsentError if a process
    does not start in time.
    """
    if (found := address(args, os.environ)) is None:
        return
    meet(found)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX would abort this process with a stack trace if another one ended in these seconds.
    watch = threading.Timer(CONNECTED, _unconnected, [found])
    watch.daemon = True
    watch.start()
    try:
        jax.distributed.initialize(
            found.coordinator,
            found.count,
            found.number,
            None if found.local is None else [found.local],
            cluster_detection_method="deactivate",
            initialization_timeout=round(2 * CONNECTED),
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=SHUTDOWN,
        )
    finally:
        watch.cancel()


def _unconnected(place: Address) -> None:
    print(
        f"error: process {place.number} of {place.count}: JAX has not connected the processes at"
        f" {place.coordinator} in {CONNECTED:g} s after all had started; one of them has ended;"
        " read the output of each, and start all processes again",
        file=sys.stderr,
        flush=True,
    )
    os._exit(FAILED)


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

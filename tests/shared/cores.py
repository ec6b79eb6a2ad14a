"""Pins a worker of pytest-xdist to a core of its own at import. Import this file before JAX.

XLA makes a thread for every visible core, and the threads of two workers on shared cores wait for
each other.
"""

import os


def available() -> list[int]:
    """Returns the cores that this process may use; empty if the platform does not report them."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _pin(worker: str) -> None:
    cores = available()
    if cores and worker:
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


_pin(os.environ.get("PYTEST_XDIST_WORKER", ""))

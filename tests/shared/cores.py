"""Pins a worker of pytest-xdist to a core of its own when imported, which is to be before JAX.

XLA makes a thread for every core that it sees, and the threads of two workers on the same cores
wait for each other.
"""

import os


def available() -> list[int]:
    """Numbers of the cores that this process may use; none where the platform does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _pin(worker: str) -> None:
    cores = available()
    if cores and worker:
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


_pin(os.environ.get("PYTEST_XDIST_WORKER", ""))

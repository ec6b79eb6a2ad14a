"""A step's metrics as a row: recorded a step behind the device, refused if they are not finite."""

import collections
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.errors import DivergedError


class Behind:
    """`with Behind(record) as behind: behind(number, metrics)`: records a step behind the device,
    which need not wait.

    The rest is recorded at the end, also where the user interrupts; an error leaves it out.
    """

    def __init__(self, record: Callable[[int, Any], None]):
        self.record, self.waiting = record, collections.deque()

    def __enter__(self) -> "Behind":
        return self

    def __call__(self, number: int, metrics) -> None:
        self.waiting.append((number, metrics))
        self._all_but(1)

    def __exit__(self, kind, *_) -> None:
        if kind is None or issubclass(kind, KeyboardInterrupt):
            self._all_but(0)

    def _all_but(self, count: int) -> None:
        while len(self.waiting) > count:
            self.record(*self.waiting[0])
            self.waiting.popleft()


class Clock:
    """`clock(number)`, called when the loss of step `number` was read: a row's `step_seconds`.

    They are the seconds a step since the loss before was read. To read a loss waits for its step,
    so nothing else need wait. The first step has none, since what comes before it is no step.
    """

    def __init__(self):
        self.last: tuple[int, float] | None = None

    def __call__(self, number: int) -> dict[str, float]:
        now, last = time.perf_counter(), self.last
        self.last = number, now
        return {} if last is None else {"step_seconds": (now - last[1]) / (number - last[0])}


def row(number: int, metrics: Mapping[str, Any], remedy: str) -> dict[str, float]:
    """The step's metrics that are numbers.

    Raises DivergedError, with `remedy`, where the loss or the gradient's norm is not finite.
    """
    found = {name: float(value) for name, value in metrics.items() if not np.ndim(value)}
    if not math.isfinite(found["loss"]) or not math.isfinite(found["grad_norm"]):
        raise DivergedError(
            f"step {number}: the loss is {found['loss']} and the gradient's norm"
            f" {found['grad_norm']}; {remedy}"
        )
    return found


def course(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Of the steps that were recorded: how many, the first and the last loss, and the median of
    their measured seconds.
    """
    first, last = (rows[0]["loss"], rows[-1]["loss"]) if rows else (None, None)
    seconds = [row["step_seconds"] for row in rows if "step_seconds" in row]
    median = statistics.median(seconds) if seconds else None
    return {"steps": len(rows), "first_loss": first, "final_loss": last, "step_seconds": median}

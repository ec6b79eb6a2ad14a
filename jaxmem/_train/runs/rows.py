"""The row of a step: its metrics as numbers, its seconds, its rates and the peak of memory."""

import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxmem.errors import RunError


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a step that are real numbers. Reading them waits for the device."""
    found = {str(name): _number(value) for name, value in metrics.items()}
    return {name: value for name, value in found.items() if value is not None}


def _number(value: Any) -> float | None:
    """A metric as a number; None for other values, such as images or texts."""
    if value is None or isinstance(value, str | bytes | Mapping | list | tuple):
        return None
    if getattr(value, "size", 1) != 1 or np.iscomplexobj(value):
        return None
    try:
        return float(value.reshape(()) if getattr(value, "ndim", 0) else value)
    except (TypeError, ValueError):
        return None


class StepMeter:
    """Measures steps. `meter(number)`, called when the metrics of step `number` were read, returns
    the seconds of the step, the units per second, and the peak of device memory.

    units: number of units in a step, by name: `tokens` makes `tokens_per_second`. Raises RunError
      for a value that is no positive number.
    """

    def __init__(self, units: Mapping[str, float]):
        for name, count in units.items():
            if not isinstance(count, int | float) or not 0 < count < float("inf"):
                raise RunError(
                    f"train: `units` has {count!r} for {name!r}; expected how many of them a step"
                    " has, a number above 0"
                )
        self._units, self._last = dict(units), None

    def begin(self) -> None:
        """Forgets the last step: the next step does not follow it."""
        self._last = None

    def __call__(self, number: int) -> dict[str, float]:
        now, last = time.perf_counter(), self._last
        self._last = number, now
        if last is None:  # the first step has no beginning that was measured
            return _peak()
        seconds = (now - last[1]) / (number - last[0])
        units = self._units.items() if seconds else ()
        rates = {f"{name}_per_second": count / seconds for name, count in units}
        return {"step_seconds": seconds} | rates | _peak()


class Best:
    """Follows a metric that some steps have and others lack.

    name: the name of the metric. None follows no metric.
    least: the least value in the notes of a checkpoint; infinite before there is a value.
    rare: whether the last finished step has the metric, and the step before lacks it.
    """

    def __init__(self, name: str | None):
        self.name = name
        self.begin(math.inf)

    def begin(self, least: float) -> None:
        """Resumes from checkpoints whose least value is `least`."""
        self.least, self.rare = least, False
        self._value, self._has = math.inf, False

    def done(self, metrics: Mapping[str, Any]) -> None:
        """Records that a step was started. Its metrics may still be computed."""
        had, self._has = self._has, self.name in metrics
        self.rare = self._has and not had

    def read(self, row: Mapping[str, float]) -> None:
        """The next step's row was written."""
        value = row.get(str(self.name), math.inf)
        self._value = value if math.isfinite(value) else math.inf

    @property
    def is_least(self) -> bool:
        """Whether the last row has a rare value that is less than all before."""
        return self.rare and self._value < self.least

    def noted(self) -> dict[str, float]:
        """The value that a checkpoint stores: the metric's name and its value in the last row."""
        self.least = min(self.least, self._value)
        return {} if self.name is None or self._value == math.inf else {self.name: self._value}


def _peak() -> dict[str, float]:
    """`peak_bytes`: the greatest number of bytes in use on any device since the process started.
    Empty if no device reports it, as on CPUs.
    """
    told = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [one["peak_bytes_in_use"] for one in told if "peak_bytes_in_use" in one]
    return {"peak_bytes": max(peaks)} if peaks else {}

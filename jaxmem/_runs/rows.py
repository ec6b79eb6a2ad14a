"""What the row of a step says: its metrics as numbers, and what was measured beside them."""

import time
from collections.abc import Mapping
from typing import Any

import jax

from jaxmem.errors import RunError


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of a step's metrics that are numbers; reading them waits for the device."""
    found = {str(name): _number(value) for name, value in metrics.items()}
    return {name: value for name, value in found.items() if value is not None}


def _number(value: Any) -> float | None:
    """A metric as a number; None for what is none, such as an image or a text."""
    if value is None or isinstance(value, str | bytes | Mapping | list | tuple):
        return None
    if getattr(value, "size", 1) != 1:
        return None
    try:
        return float(value.reshape(()) if getattr(value, "ndim", 0) else value)
    except (TypeError, ValueError):
        return None


class Measured:
    """`measured(number)` as the metrics of step `number` were read: the seconds that it took, how
    much was done in one, and the most bytes that a device has had in use.

    units: how many a step has of what, by name: `tokens` makes `tokens_per_second`. Raises RunError
      for what cannot be counted.
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
        """Another step than the one that was read last comes next."""
        self._last = None

    def __call__(self, number: int) -> dict[str, float]:
        now, last = time.perf_counter(), self._last
        self._last = number, now
        if last is None:  # what the first one took is not known
            return _peak()
        seconds = (now - last[1]) / (number - last[0])
        units = self._units.items() if seconds else ()
        rates = {f"{name}_per_second": count / seconds for name, count in units}
        return {"step_seconds": seconds} | rates | _peak()


def _peak() -> dict[str, float]:
    """`peak_bytes`: of the device that had most in use since the process began. Nothing where no
    device tells, as CPUs do not.
    """
    told = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [one["peak_bytes_in_use"] for one in told if "peak_bytes_in_use" in one]
    return {"peak_bytes": max(peaks)} if peaks else {}

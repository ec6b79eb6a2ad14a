"""Summarizes the rows of a run, and selects the settings that a resumed run must not change."""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

# Settings that a resumed run may change. They do not change its arithmetic, except for the codecs
# of another plan.
FREE = (
    "plan.",
    "states.",
    "mesh.",
    "sample.",
    "train.log_every",
    "train.eval_batches",
    "train.save_every",
    "train.tensorboard",
)


def lasting(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that a run never changes, by their names with sections."""

    def flat(settings: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
        for name, value in settings.items():
            if isinstance(value, Mapping):
                yield from flat(value, f"{before}{name}.")
            else:
                yield f"{before}{name}", value

    return {name: value for name, value in flat(settings, "") if not name.startswith(FREE)}


def course(rows: list[Mapping[str, float]], unit: str, count: int) -> dict[str, Any]:
    """Returns the summary of all recorded steps, of earlier processes too: the number of steps, the
    first and the last loss, the median of step seconds, the units per second, and the peak bytes in
    use on a device. A step has `count` units. Skipped steps have no loss.
    """
    losses = [row["loss"] for row in rows if "loss" in row]
    first, last = (losses[0], losses[-1]) if losses else (None, None)
    seconds = [row["step_seconds"] for row in rows if "step_seconds" in row]
    return {
        "steps": len(rows),
        "first_loss": first,
        "final_loss": last,
        "step_seconds": statistics.median(seconds) if seconds else None,
        f"{unit}_per_second": count * len(seconds) / sum(seconds) if sum(seconds) else None,
        "peak_bytes": max((row["peak_bytes"] for row in rows if "peak_bytes" in row), default=None),
    }

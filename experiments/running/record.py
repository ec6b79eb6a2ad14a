"""What is told of a run's rows, and which of its settings may not change when it goes on."""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

# What a run may go on with that it did not begin with: nothing of these is in its arithmetic, but
# for the codecs of another plan.
FREE = (
    "plan.",
    "states.",
    "sample.",
    "train.log_every",
    "train.eval_batches",
    "train.save_every",
    "train.tensorboard",
)


def lasting(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run has to its end, by their names with sections."""

    def flat(settings: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
        for name, value in settings.items():
            if isinstance(value, Mapping):
                yield from flat(value, f"{before}{name}.")
            else:
                yield f"{before}{name}", value

    return {name: value for name, value in flat(settings, "") if not name.startswith(FREE)}


def course(rows: list[Mapping[str, float]], unit: str, count: int) -> dict[str, Any]:
    """Of the steps that were recorded, whichever process did them: how many, the first and the last
    loss, the median of their measured seconds, how many of `unit` a second, of which a step has
    `count`, and the most bytes in use on a device. Steps that were left out have no loss.
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

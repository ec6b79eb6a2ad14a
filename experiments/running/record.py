"""What a run leaves behind: files that appear whole or not at all, rows that are flushed, a line of
progress.
"""

import collections
import contextlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import numpy as np

from experiments.errors import DivergedError, InputError

RESULTS = ("metrics.jsonl", "plan.json", "summary.json", "report.html")


def check_folder(out: str | pathlib.Path) -> pathlib.Path:
    """`out` as a path, if results can be written there; creates nothing."""
    out = pathlib.Path(out)
    place = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not place.is_dir():
        raise InputError(
            f"--out: got {str(out)!r}, and {place} is a file; allowed: a folder, or a path where"
            " one can be made"
        )
    if not os.access(place, os.W_OK):
        raise InputError(
            f"--out: got {str(out)!r}, and {place} cannot be written to; allowed: a folder that can"
        )
    return out


@contextlib.contextmanager
def results(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """The folder, made, without the results of an earlier run."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in RESULTS:
            (out / name).unlink(missing_ok=True)
        yield out
    except OSError as error:
        raise InputError(f"--out: cannot write to {str(out)!r}: {error}") from error


def write_json(path: pathlib.Path, data: dict) -> None:
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    os.replace(part, path)


def write_row(file: TextIO, row: dict) -> None:
    file.write(json.dumps(row, allow_nan=False) + "\n")
    file.flush()


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


@contextlib.contextmanager
def recording(
    path: pathlib.Path, rows: list[dict], progress: "Progress", help: str
) -> Iterator[Behind]:
    """Each step's metrics that are numbers, a step behind the device: to `rows`, to the file at
    `path`, and to `progress`.

    Raises DivergedError, with `help`, where the loss or the gradient's norm is not finite; such a
    step is no row.
    """
    with path.open("w") as file:

        def record(number: int, metrics) -> None:
            row = {"step": number} | {
                name: float(value) for name, value in metrics.items() if not np.ndim(value)
            }
            if not math.isfinite(row["loss"]) or not math.isfinite(row["grad_norm"]):
                raise DivergedError(
                    f"step {number}: the loss is {row['loss']} and the gradient's norm"
                    f" {row['grad_norm']}; {help};"
                    f" rows until then are in {path}"
                )
            rows.append(row)
            progress(number, row["loss"])
            write_row(file, row)

        with Behind(record) as behind:
            yield behind


def course(rows: list[dict]) -> dict:
    """Of the steps that were recorded: how many, and the first and the last loss."""
    first, last = (rows[0]["loss"], rows[-1]["loss"]) if rows else (None, None)
    return {"steps": len(rows), "first_loss": first, "final_loss": last}


class Progress:
    """Step, loss and speed on standard error: one line, rewritten; where that is a pipe, a line now
    and then.
    """

    def __init__(self, steps: int, every: int, tokens_per_step: int):
        self.steps, self.every, self.tokens = steps, every, tokens_per_step
        self.first = self.last = time.perf_counter()
        self.done = 0
        self.terminal = sys.stderr.isatty()

    @property
    def tokens_per_second(self) -> float | None:
        """Of the steps after the first, which may have compiled."""
        if self.done < 2 or self.last == self.first:
            return None
        return (self.done - 1) * self.tokens / (self.last - self.first)

    def __call__(self, step: int, loss: float) -> None:
        self.last, self.done = time.perf_counter(), self.done + 1
        if self.done == 1:
            self.first = self.last
        speed = self.tokens_per_second
        text = f"step {step}/{self.steps}  loss {loss:.4f}" + (
            f"  {speed:,.0f} tokens/s" if speed else ""
        )
        final = step == self.steps
        if self.terminal:
            print(f"\r\x1b[K{text}", end="\n" if final else "", file=sys.stderr, flush=True)
        elif step == 1 or final or step % self.every == 0:
            print(text, file=sys.stderr, flush=True)

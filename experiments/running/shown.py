"""Shows the progress and the results of a run: drawn by rich on a terminal, else as plain lines."""

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table


class Progress:
    """Shows step, loss and speed on standard error: a bar on a terminal, else a line `every` steps.

        with Progress(steps, every=10, unit="tokens", count=2048) as progress:
            progress(number, loss)

    Speed is in units per second; a step has `count` units. The first step does not count, since it
    may include a compile.
    """

    def __init__(self, steps: int, every: int, unit: str, count: int):
        self.steps, self.every, self.unit, self.count = steps, every, unit, count
        self.first = self.last = time.perf_counter()
        self.done, self.bar = 0, None

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            text, bar, rest = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
            console = Console(file=sys.stderr)
            self.bar = Bar(bar, MofNCompleteColumn(), text, rest, console=console)
            self.bar.start()
            self.task = self.bar.add_task("", total=self.steps)
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.stop()

    @property
    def speed(self) -> float | None:
        """Units per second."""
        if self.done < 2 or self.last == self.first:
            return None
        return (self.done - 1) * self.count / (self.last - self.first)

    def __call__(self, step: int, loss: float | None) -> None:
        self.last, self.done = time.perf_counter(), self.done + 1
        if self.done == 1:
            self.first = self.last
        said = "left out" if loss is None else f"loss {loss:.4f}"
        if self.speed is not None:
            said += f"  {self.speed:,.0f} {self.unit}/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=said)
        elif step in (1, self.steps) or step % self.every == 0:
            print(f"step {step}/{self.steps}  {said}", file=sys.stderr, flush=True)


def table(rows: Mapping[str, str]) -> None:
    """Prints names and values on standard error."""
    if not sys.stderr.isatty():
        for name, value in rows.items():
            print(f"{name}: {value}", file=sys.stderr)
        return
    drawn = Table(show_header=False)
    for name, value in rows.items():
        drawn.add_row(escape(name), escape(value))  # a path may contain rich's markup
    Console(file=sys.stderr).print(drawn)

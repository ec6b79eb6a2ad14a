"""What saving costs a training: gpt_nano that saves every minute against one that never does.

    python -m benchmarks.saving

One training by `jaxmem.runs.train`, whose clock asks for a save every 17 steps here. A round is
the 8 steps from a save on, during which it is also written, and the 8 after them, in which nothing
is saved; so what else the machine does falls on both alike. `extra` are the seconds of the former
less those of the latter: what a save costs a run, in whatever way. A run that saves every minute
takes 1 + extra / 60 of the time of one that does not.

`blocks` are the seconds in which the loop stands still: while the arrays are copied. `whole` are
those until the checkpoint is on the disk.
"""

import functools
import pathlib
import statistics
import tempfile
import time
from unittest import mock

import jax

from benchmarks.shared.released import nbytes
from benchmarks.shared.results import Benchmark, Report, measure
from experiments.command.load import load
from experiments.running.planning import prepare
from experiments.running.text import TEXT
from jaxmem import runs
from jaxmem._target.processes.pace import Pace
from jaxmem._train.checkpoints.checkpoints import Checkpoints
from jaxmem._train.runs import train as training

ROUNDS = 60
STEPS = 8  # of each half of a round
EVERY = 60.0  # seconds between two saves, by the clock of the loop and by that of the result
CONFIG = load("gpt_nano", ["plan.budget=none"])


class Watched(Checkpoints):
    """Notes when each save began, and what it took."""

    noted: dict[int, dict[str, float]]

    def save(self, step, state, notes):
        self.noted[step] = {"began": time.perf_counter()}
        super().save(step, state, notes)
        self.noted[step]["blocks"] = time.perf_counter() - self.noted[step]["began"]

    def _finish(self, path, step, leaves, notes, failed):
        super()._finish(path, step, leaves, notes, failed)
        self.noted[step]["whole"] = time.perf_counter() - self.noted[step]["began"]


def trained(rounds: int) -> tuple[dict[int, dict[str, float]], dict[int, float]]:
    """What each save took, and when each row was there, by step."""
    ready, data, seen = prepare(CONFIG), TEXT.read(CONFIG), {0: 0.0}
    saves: dict[int, dict[str, float]] = {}
    clock = lambda: EVERY * max(seen) / (2 * STEPS)
    batch = lambda number: TEXT.batch(CONFIG, data, number)
    note = lambda number, row: seen.update({number: time.perf_counter()})
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(training, "Pace", functools.partial(Pace, clock=clock)),
        mock.patch.object(training, "Checkpoints", Watched),
        mock.patch.object(Watched, "noted", saves, create=True),
        runs.record(pathlib.Path(folder) / "out", resume=True) as run,
    ):
        given = {"steps": (2 * STEPS + 1) * (rounds + 2), "run": run, "save_every": EVERY}
        first = lambda: TEXT.first_state(CONFIG, None)
        runs.train(ready.step, first, batch, **given, each=note)
    return saves, seen


def run(report: Report) -> None:
    saves, seen = trained(ROUNDS)
    # Not the first of all, nor the last, of which there is no half without it.
    whole = sorted(step for step in saves if step and step + 2 * STEPS < max(seen))
    report.results = {}
    for step in whole[1 : ROUNDS + 1]:
        begin, middle, end = (seen[step + n * STEPS] for n in (0, 1, 2))
        took = {key: saves[step][key] for key in ("blocks", "whole")}
        report.results[f"step {step}"] = {"with": middle - begin, "without": end - middle} | took


def summary(report: Report) -> dict:
    rounds = list(report.results.values())
    of = lambda key: [one[key] for one in rounds]
    extra = [one["with"] - one["without"] for one in rounds]
    low, median, high = statistics.quantiles(extra, n=4)
    ratio = lambda seconds: 1 + seconds / EVERY
    return {
        "saves": len(rounds),
        "state bytes": nbytes(jax.eval_shape(lambda: TEXT.first_state(CONFIG, None))),
        "steps a second": STEPS / statistics.median(of("without")),
        "extra, median": median,
        "extra, quartiles": [low, high],
        "ratio, median": ratio(median),
        "ratio, quartiles": [ratio(low), ratio(high)],
        "ratio, mean": ratio(statistics.fmean(extra)),
        "blocks, median": statistics.median(of("blocks")),
        "blocks, most": max(of("blocks")),
        "whole, median": statistics.median(of("whole")),
    }


RESULTS = {"saving": Benchmark(run=run, summary=summary)}

if __name__ == "__main__":
    measure("saving", RESULTS)

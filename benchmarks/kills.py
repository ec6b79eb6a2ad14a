"""A training that is stopped at random moments, by SIGKILL, SIGTERM and SIGINT, and started again
by the same command until it ends: what is lost, and whether it ends as one that was not stopped.

    python -m benchmarks.kills [--kills N] [--asked N]

A small GPT under a plan, which saves after every step, so that each start imports, plans, compiles,
reads a checkpoint, trains, saves and evaluates. Before a signal the checkpoints are read that the
process has finished; after it, the newest that is whole must be as new. Rows and losses of a run
that has ended are compared with those of a run that was not stopped. Two runs go on beside each
other.
"""

import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings

from benchmarks.shared.case import SMALL
from benchmarks.shared.results import Report
from jaxmem import runs
from jaxmem._train.checkpoints.checkpoints import Checkpoints, steps_in
from jaxmem.errors import RunError

SETTINGS = (
    *SMALL, "train.steps=40", "train.eval_batches=2", "train.save_every=0", "optimizer.warmup=2",
    "sample.length=20",
)  # fmt: skip
STEPS = 40


def start(out: pathlib.Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "experiments.train", "gpt_nano", *SETTINGS, "--out", str(out)]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, encoding="utf-8"
    )


def rows_of(folder: pathlib.Path) -> list[dict]:
    """The rows that are whole, without what a clock said."""
    path, found = folder / "metrics.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            found.append({k: v for k, v in row.items() if not k.endswith(("_seconds", "_second"))})
        except ValueError:
            break
    return found


def unfinished(out: pathlib.Path) -> pathlib.Path | None:
    return next(
        (path for path in out.glob("unfinished-*") if any(path.glob("checkpoints/*"))), None
    )


def finished(out: pathlib.Path) -> int:
    """The newest step that is saved."""
    path = unfinished(out)
    return max(steps_in(path / "checkpoints") if path else (), default=0)


def newest(out: pathlib.Path) -> int:
    """The newest that is whole, by its sums."""
    path = unfinished(out)
    if path is None:
        return 0
    with Checkpoints(path / "checkpoints", 2) as checkpoints, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = checkpoints.newest() if finished(out) else None
    return 0 if found is None else found.step


class Runner:
    """Stops one run after the other in a folder of its own, and counts."""

    def __init__(self, out: pathlib.Path, whole: pathlib.Path, seconds: float, seed: int):
        self.out, self.whole, self.seconds = out, whole, seconds
        self.draw = random.Random(seed)

    def stop(self, number: signal.Signals) -> dict:
        process = start(self.out)
        said: list[str] = []
        assert process.stderr is not None
        reader = threading.Thread(target=lambda: said.extend(process.stderr))  # pyright: ignore
        reader.start()
        try:
            process.wait(self.draw.uniform(0.5, self.seconds))
        except subprocess.TimeoutExpired:
            acknowledged = finished(self.out)
            process.send_signal(number)
        else:
            acknowledged = None
        process.wait()
        reader.join()
        if (self.out / "summary.json").exists() or any(self.out.glob("ended-*")):
            return self.ended() | {"signal": None if acknowledged is None else number.name}
        kept, path = newest(self.out), unfinished(self.out)
        written = rows_of(path) if path else []
        phase = "before a step" if not written else "steps" if len(written) < STEPS else "the end"
        return {
            "signal": number.name,
            "code": process.returncode,
            "phase": phase,
            "lost": max((acknowledged or 0) - kept, 0),
            "repeated": max(len(written) - kept, 0),
            "traceback": any("Traceback" in line for line in said),
        } | ({"said": said[-1:]} if process.returncode in (1, 2) else {})

    def ended(self) -> dict:
        with contextlib.suppress(RunError), runs.record(self.out):
            pass  # which moves what a killed process did not, and refuses a folder whose run ended
        summaries = [
            json.loads((path / "summary.json").read_text(encoding="utf-8"))["val_loss"]
            for path in (self.out, self.whole)
        ]
        same = rows_of(self.out) == rows_of(self.whole) and summaries[0] == summaries[1]
        shutil.rmtree(self.out)
        return {"ended": True, "same": same}


def kinds_left(report: Report) -> list[signal.Signals]:
    """The signals that are still to be sent, in random order."""
    kills, asked = report.chosen["kills"], report.chosen["asked"]
    kinds = [signal.SIGKILL] * kills + [signal.SIGTERM, signal.SIGINT] * (asked // 2)
    random.Random(0).shuffle(kinds)
    for done in report.results.values():
        if done["signal"] is not None:
            kinds.remove(signal.Signals[done["signal"]])
    return kinds


def whole_run(whole: pathlib.Path) -> float:
    """Seconds of a run that is not stopped, whose programs are compiled."""
    seconds = 0.0
    for again in (False, True):  # the first fills the cache
        shutil.rmtree(whole, ignore_errors=True)
        began = time.monotonic()
        with start(whole) as process:
            process.communicate()
        assert process.returncode == 0, again
        seconds = time.monotonic() - began
    return seconds


def stop_all(report: Report, left: list, scratch: pathlib.Path) -> None:
    """Sends the signals that are left, to two runs beside each other."""
    whole, lock = scratch / "whole", threading.Lock()
    seconds = 1.4 * whole_run(whole)

    def work(number: int) -> None:
        runner = Runner(scratch / f"out{number}", whole, seconds, number)
        while True:
            with lock:
                if not left:
                    return
                kind = left.pop()
            found = runner.stop(kind)
            with lock:
                if "ended" in found and found["signal"] != kind.name:
                    left.append(kind)  # it had ended before the signal was sent
                report.add(str(len(report.results)), found)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


def of_signal(found: list[dict], name: str) -> dict:
    sent = [r for r in found if r["signal"] == name]
    of = [r for r in sent if "ended" not in r]
    count = lambda key: collections.Counter(r[key] for r in of)
    return {
        "stopped": len(of),
        "after its run": len(sent) - len(of),
        "by phase": dict(sorted(count("phase").items())),
        "codes": {str(code): n for code, n in sorted(count("code").items())},
        "steps lost that were saved": sum(r["lost"] for r in of),
        "most steps repeated": max((r["repeated"] for r in of), default=0),
        "tracebacks": sum(r["traceback"] for r in of),
    }


def summary(report: Report) -> dict:
    found = list(report.results.values())
    ended = [r for r in found if "ended" in r]
    told = {"ended": len(ended), "as without": sum(r["same"] for r in ended)}
    return told | {name: of_signal(found, name) for name in ("SIGKILL", "SIGTERM", "SIGINT")}


def main() -> None:
    report = Report("kills", kills=200, asked=60)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{scratch}/cache"
        stop_all(report, kinds_left(report), pathlib.Path(scratch))
    report.summarise(summary(report))


if __name__ == "__main__":
    main()

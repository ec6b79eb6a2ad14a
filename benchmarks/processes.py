"""Runs of two processes: faults while they train, and what two processes cost.

    python -m benchmarks.processes [RESULT ...]

`process_kills`: a run of two processes, of two devices each, is stopped by SIGKILL of one of them,
and started again by the same command until it ends. The process and the moment are drawn; the
moment is after the processes have found each other. The run saves after every step, so that many
moments fall into a save. Before the signal, the finished checkpoints are listed; after it, the
newest whole checkpoint must be as new. The other process must end within a minute, with a message.
Losses of a run that has ended are compared with a run without faults. A run is stopped up to four
times. A fault after the last exchange of a run is late: both processes end as usual.

`network_cuts`: two processes run in two network namespaces. The link between the namespaces is
taken down at one end, or packets are dropped silently: the packets of the first process, of the
second process, or of both. Both processes must end within a minute, each with a message. The link
is mended before the run is started again. This result needs the rights to make namespaces.

`process_resumes`: gpt_345m in two processes of two CPU devices each (fsdp 2, tensor 2), in float32,
with 4 sequences of 64 tokens. Both processes are killed during training, and the run resumes in one
process with two devices (fsdp 2). The losses are compared with a run without a fault.

`process_times`: seconds of a step, and of a save, of two processes of one device each against one
process of two devices. A round is a run of each, one after the other, of one config over one mesh.
Seconds of a step are the median over the steps of a run, which saves every two seconds. Seconds
of a save are from its begin until the checkpoint is on the disk, the median over the run. Both
processes run on this machine, whose cores the single process has to itself.
"""

import json
import os
import pathlib
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.faults import is_same, rows_of, unfinished
from benchmarks.shared.results import Benchmark, Report, measure, say
from benchmarks.shared.timing import over
from jaxmem._core.files import read_json
from jaxmem._train.checkpoints.checkpoints import WRITING, first_whole, steps_in
from jaxmem._train.runs.record import rows_until
from tests.shared import children
from tests.shared.pair import MESH, MICRO, SECONDS, Network, Pair, Run, alone

KILLS, CUTS, EACH = 40, 20, 4
LIMIT = 90.0  # seconds after which a process that has not ended is ended
SETTINGS = (*MESH, "train.steps=24")
PAUSE = "0.1"  # seconds of a batch, so that a run is not over at once
CUTS_OF = {  # the ends of the link, and whether silently
    "link down at process 0": ((0,), False),
    "link down at process 1": ((1,), False),
    "packets of process 0 lost": ((0,), True),
    "packets of process 1 lost": ((1,), True),
    "all packets lost": ((0, 1), True),
}
MESSAGES = (
    r"^error: the run ends, since a process failed: (.*)",  # of the experiments' watch
    r"JAX distributed service detected fatal errors.*absl::Status: (.*(?:\n\d+$)?)",  # of JAX
)


def message(said: str) -> str | None:
    """The last message of a process about its end."""
    found = (re.findall(pattern, said, re.MULTILINE) for pattern in MESSAGES)
    return next((texts[-1][:200] for texts in found if texts), None)


def joined(pair: Pair) -> None:
    """Waits until the processes have found each other."""
    end = time.monotonic() + SECONDS
    while not all("joined" in pair.said(number) for number in range(2)):
        assert time.monotonic() < end, pair.said(0) + pair.said(1)
        time.sleep(0.02)


def seconds_of(out: pathlib.Path, network: Network | None = None) -> float:
    """Seconds of a run without faults, after the processes have found each other."""
    with Pair(out, *SETTINGS, network=network, PAUSE=PAUSE) as pair:
        joined(pair)
        began = time.monotonic()
        assert pair.codes() == [0, 0], pair.said(0) + pair.said(1)
        return time.monotonic() - began


def stopped(
    out: pathlib.Path, wait: float, fault: Callable[[Pair], set[int]], network: Network | None
) -> dict:
    """Starts a run, makes a fault after so many seconds, and waits until both processes have ended.
    `fault(pair)` returns the numbers of the processes that it does not kill.
    """
    with Pair(out, *SETTINGS, network=network, PAUSE=PAUSE) as pair:
        joined(pair)
        began = time.monotonic()
        if None not in pair.codes(wait):
            return {"ended": True, "codes": pair.codes()}
        listed = max(steps_in(unfinished(out) / "checkpoints"), default=0)
        left, made = fault(pair), time.monotonic()
        writes = any((unfinished(out) / "checkpoints").glob(f"{WRITING}*"))
        ends = {number: at - made for number, at in pair.ends(LIMIT)}
        codes, said = pair.codes(0), {number: message(pair.said(number)) for number in left}
    path = unfinished(out)
    whole = first_whole(path / "checkpoints", steps_in(path / "checkpoints"))  # by its sums
    ended = (out / "summary.json").exists() or any(out.glob("ended-*"))
    return {
        "after": made - began,
        "writes": writes,
        "codes": codes,
        "seconds": {number: ends.get(number) for number in left},
        "said": said,
        "lost": 0 if ended else max(listed - (whole.step if whole else 0), 0),
        "ended": ended,
    }


def kill(draw: random.Random) -> tuple[str, Callable[[Pair], set[int]]]:
    number = draw.randrange(2)

    def fault(pair: Pair) -> set[int]:
        pair.running[number].kill()
        return {1 - number}

    return f"process {number} killed", fault


def cut(number: int, network: Network) -> tuple[str, Callable[[Pair], set[int]]]:
    name = list(CUTS_OF)[number % len(CUTS_OF)]

    def fault(_: Pair) -> set[int]:
        network.cut(*CUTS_OF[name])
        return {0, 1}

    return name, fault


def one_run(folder: pathlib.Path, number: int, seconds: float, network: Network | None) -> dict:
    """A run with up to `EACH` faults, which is then let end."""
    draw, out, made = random.Random(number), folder / f"out{number}", []
    while len(made) < EACH:
        name, fault = kill(draw) if network is None else cut(EACH * number + len(made), network)
        row = stopped(out, draw.uniform(0, seconds), fault, network)
        if network is not None:
            network.mend()
        if "seconds" in row:
            made.append({"fault": name} | row)
            say(json.dumps(made[-1]))
        if row["ended"]:
            break
    if not (out / "summary.json").exists() and not any(out.glob("ended-*")):
        seconds_of(out, network)
    return {"faults": made, "same": is_same(out, folder / "whole")}


def made(report: Report) -> tuple[list[dict], int]:
    """The faults that processes had to end of, and the number of late faults."""
    found = [fault for run in report.results.values() for fault in run["faults"]]
    late = [fault for fault in found if not any(fault["codes"])]
    return [fault for fault in found if fault not in late], len(late)


def faults(report: Report, count: int, network: Network | None = None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/cache"
        seconds_of(folder / "first", network)  # which fills the cache
        seconds = seconds_of(folder / "whole", network)
        alone(folder / "alone", 4, *SETTINGS)
        losses = lambda name: [row["loss"] for row in rows_of(folder / name)]
        assert losses("alone") == losses("whole"), "two processes are one"
        while len(made(report)[0]) < count:
            number = len(report.results)
            report.add(f"run {number}", one_run(folder, number, seconds, network))


def cuts(report: Report) -> None:
    with Network() as network:
        faults(report, CUTS, network)


def of_faults(report: Report) -> dict:
    runs = list(report.results.values())
    found, late = made(report)
    ends = [(s, f["said"][n]) for f in found for n, s in f["seconds"].items()]
    took = [seconds for seconds, _ in ends if seconds is not None]
    return {
        "runs": len(runs),
        "as without": sum(run["same"] for run in runs),
        "faults": len(found),
        "late": late,
        "while a checkpoint was written": sum(f["writes"] for f in found),
        "processes that had to end": len(ends),
        "ended within a minute": sum(seconds <= 60 for seconds in took),
        "with a message": sum(said is not None for _, said in ends),
        "seconds, median": statistics.median(took),
        "seconds, most": max(took),
        "steps lost that were saved": sum(f["lost"] for f in found),
        "by fault": {
            name: sum(f["fault"] == name for f in found)
            for name in sorted({f["fault"] for f in found})
        },
    }


# -- process_times

ROUNDS = 5
TIMED = (
    "model.layers=4", "model.width=128", "model.heads=4", "train.sequence=256",
    "train.loss_chunk=64", "train.steps=30", "train.save_every=2.0", "mesh.data=2",
)  # fmt: skip
PROGRAM = "benchmarks.shared.timed_run"


def timed(out: pathlib.Path, processes: int) -> dict[str, float]:
    """The median seconds of a step and of a save of one run."""
    environment = lambda devices: children.as_users_have(children.with_cpus(devices))
    if processes == 2:
        with Pair(out, *TIMED, program=PROGRAM, environment=environment(1)) as pair:
            assert pair.codes() == [0, 0], pair.said(0) + pair.said(1)
    else:
        children.python("-m", PROGRAM, 0, 1, "", out, *MICRO, *TIMED, environment=environment(2))
    steps = [row["step_seconds"] for row in rows_until(out / "metrics.jsonl", sys.maxsize)[0][1:]]
    saves = [save["whole"] for save in read_json(out / "saves.json").values()]
    assert len(saves) > 2, saves
    return {"step": statistics.median(steps), "save": statistics.median(saves)}


def times(number: int) -> dict[str, dict[str, float]]:
    found = {}
    with tempfile.TemporaryDirectory(prefix="jaxmem-") as name:
        for processes in random.Random(number).sample((1, 2), 2):
            found[str(processes)] = timed(pathlib.Path(name) / str(processes), processes)
    return found


def of_times(report: Report) -> dict:
    rounds = list(report.results.values())
    of = lambda what, n: [one[n][what] for one in rounds]
    return {
        what: {n: statistics.median(of(what, n)) for n in ("1", "2")}
        | {"ratio": over(of(what, "2"), of(what, "1"))}
        for what in ("step", "save")
    }


# -- process_resumes

LARGE = (
    "model.dtype=float32", "model.vocab=50304", "train.batch=4", "train.sequence=64",
    "train.loss_chunk=32", "train.steps=10", "train.save_every=60", "train.log_every=1",
    "train.eval_batches=1", "sample.length=2", "optimizer.warmup=2", "plan.budget=none",
)  # fmt: skip
KILLED, LONGEST = 3, 1200.0  # the first step after which processes are killed; seconds of a run
ON_TWO = "mesh.fsdp=2", "mesh.tensor=1"  # devices, in one process


def resumes(config: str) -> dict[str, Any]:
    """The losses of a run in two processes with four devices, without a fault; and of a run whose
    processes are both killed, and that resumes in one process with two devices.
    """
    large = Run("train", config, LARGE)
    with tempfile.TemporaryDirectory(prefix="jaxmem-") as name:
        whole, out = pathlib.Path(name) / "whole", pathlib.Path(name) / "out"
        with Pair(whole, *MESH, run=large) as pair:
            assert pair.codes(LONGEST) == [0, 0], pair.said(0) + pair.said(1)
        losses = [row["loss"] for row in rows_of(whole)]
        shutil.rmtree(whole)
        with Pair(out, *MESH, run=large) as pair:
            pair.reaches(KILLED, LONGEST)
            # A run whose only checkpoint is of the beginning would begin again.
            while not (saved := max(steps_in(unfinished(out) / "checkpoints"), default=0)):
                assert pair.codes(0.1) == [None, None], pair.said(0) + pair.said(1)
            for one in pair.running:
                one.kill()
            pair.codes()
        alone(out, 2, *ON_TWO, run=large)
        resumed = [row["loss"] for row in rows_of(out)]
    off = max(abs(b / a - 1) for a, b in zip(losses, resumed, strict=True))
    return {"losses": losses, "resumed": resumed, "steps saved": saved, "largest difference": off}


RESULTS = {
    "process_resumes": Benchmark(("gpt_345m",), row=resumes),
    "process_kills": Benchmark((KILLS,), faults, of_faults),
    "network_cuts": Benchmark(run=cuts, summary=of_faults),
    "process_times": Benchmark(range(ROUNDS), row=times, summary=of_times),
}

if __name__ == "__main__":
    measure("processes", RESULTS)

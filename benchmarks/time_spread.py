"""Does the spread of a piece's runs tell that the machine was busy, and how wrong are its times?

    python -m benchmarks.time_spread

The pieces of gpt_nano's step are measured in sessions: beside whatever else the machine does, and
before all of it, by Linux's real-time scheduling, which takes the rights of an administrator. A
time's error is by how much it exceeds the least that any session gave. Run it on a busy machine.
"""

import os
import pathlib
import statistics
import tempfile

from benchmarks.shared.case import Case
from benchmarks.shared.results import Report
from jaxmem._core.database import Database, Timing
from jaxmem._cost.profile.times import BUSY
from jaxmem._target.compile.backend import Local
from jaxmem._target.compile.timing import measure
from jaxmem._target.devices.target import Target
from jaxmem._trace.job import Job


class Pieces(Local):
    """Keeps the pieces that it is asked to time."""

    def times(self, jobs):
        self.jobs: list[Job] = list(jobs)
        return [Timing(1e-4)] * len(jobs)


def pieces() -> list[Job]:
    backend = Pieces(Target.parse("local"))
    with tempfile.TemporaryDirectory() as folder:
        database = Database(pathlib.Path(folder) / "profile.sqlite")
        assert Case("gpt_nano", backend, database).profile.time_source == "measured"
    return backend.jobs


def before_all_others(first: bool) -> None:
    """Moves every thread of this process before those of others, or back among them."""
    policy = os.SCHED_FIFO if first else os.SCHED_OTHER
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), policy, os.sched_param(int(first)))


def session(jobs: list[Job], first: bool) -> dict:
    """Least seconds of each piece and the spread of its runs, as the library takes them."""
    before_all_others(first)
    try:
        runs = [measure(job) for job in jobs]
    finally:
        before_all_others(False)
    return {
        "first": first,
        "load_average": os.getloadavg()[0],
        "seconds": [min(r) for r in runs],
        "spreads": [statistics.median(r) / min(r) - 1 for r in runs],
    }


def of_sessions(own: list[dict], least: list[float]) -> dict:
    errors = [[t / best - 1 for t, best in zip(s["seconds"], least)] for s in own]
    pairs = [p for s, e in zip(own, errors) for p in zip(s["spreads"], e)]
    medians = lambda many: sorted(round(statistics.median(one), 3) for one in many)
    return {
        "load_averages": [round(s["load_average"], 1) for s in own],
        "spread_of_sessions": medians(s["spreads"] for s in own),
        "error_of_sessions": medians(errors),
        "error_of_narrow_pieces": statistics.median(e for s, e in pairs if s < BUSY),
        "error_of_wide_pieces": statistics.median(e for s, e in pairs if s >= BUSY),
    }


def summary(report: Report) -> dict:
    sessions = report.results.values()
    least = [min(seconds) for seconds in zip(*(s["seconds"] for s in sessions))]
    of = lambda first: of_sessions([s for s in sessions if s["first"] == first], least)
    return {"busy": BUSY, "before_others": of(True), "beside_others": of(False)}


def main() -> None:
    report = Report("time_spread", sessions=8)
    jobs = pieces()
    for number in range(report.chosen["sessions"]):
        for first in (True, False):
            key = f"{'before' if first else 'beside'} others, {number}"
            report.once(key, session, jobs, first)
    report.summarise(summary(report))


if __name__ == "__main__":
    main()

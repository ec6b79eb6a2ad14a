"""Configs and plans' files that must be refused: how many are, and how.

    python -m benchmarks.bad_files

Each has one mistake, and is made of one that is in order: of all shipped configs, of a plan of the
library for a small GPT, and of a plan of which no field is empty (`tests/shared/bad_configs.py` and
`bad_plans.py`). A config is given to its command; a plan's file to the commands that read one, in
turns, and to a training as `plan.path`. It is refused if the command ends with exit code 2 and a
message that names the file and the key, without a traceback, before anything is compiled or
written.
"""

import itertools
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator

from benchmarks.shared.case import SMALL
from benchmarks.shared.results import Report
from experiments import train, train_glue, train_images
from experiments.command.load import FOLDER, load
from experiments.running.planning import new_plan
from jaxmem import cli
from tests.shared.bad import Bad, mistakes
from tests.shared.bad_configs import bad_configs
from tests.shared.bad_plans import bad_plans, full

PROGRAMS = {"train": train, "train_glue": train_glue, "train_images": train_images}
CONFIG, PLAN = "mine.toml", "mine.json"
READERS: tuple[tuple[Callable, list[str]], ...] = (
    (cli.main, ["show", PLAN]),
    (cli.main, ["diff", "whole.json", PLAN]),
    (cli.main, ["report", PLAN]),
    (cli.main, ["verify", PLAN, "absent:step"]),
    (cli.main, ["explain", "absent:step", "--plan", PLAN]),
    (train.main, ["gpt_nano", f"plan.path={PLAN}", "--out", "new"]),
)
Case = tuple[Bad, Callable, list[str]]


def of_configs() -> Iterator[Case]:
    for path in sorted(FOLDER.glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        name = next(n for n in reversed(PROGRAMS) if f"experiments.{n} " in text)
        for bad in bad_configs(text, name):
            yield bad, PROGRAMS[name].main, [CONFIG, "--out", "new"]


def of_plans() -> Iterator[Case]:
    full().save("whole.json")
    new_plan(load("gpt_nano", SMALL)).save("real.json")
    for name in ("whole.json", "real.json"):
        text = pathlib.Path(name).read_text(encoding="utf-8")
        for bad, (main, line) in zip(bad_plans(text), itertools.cycle(READERS)):
            yield bad, main, line


def tried(cases: Iterator[Case], file: str) -> dict[str, dict[str, int]]:
    """The files of each kind of mistake, and those that were refused. No file is tried twice."""
    found: dict[str, dict[str, int]] = {}
    seen: set[bytes] = set()
    for bad, main, line in cases:
        if bad.content in seen:
            continue
        seen.add(bad.content)
        pathlib.Path(file).write_bytes(bad.content)
        wrong = mistakes(main, line, file, bad.key)
        if wrong:
            print(bad.kind, bad.key, line, wrong, bad.content[:200])
        row = found.setdefault(bad.kind, {"files": 0, "refused": 0})
        row["files"] += 1
        row["refused"] += not wrong
    return found


def summary(report: Report) -> dict:
    total = lambda rows, what: sum(row[what] for row in rows.values())
    return {
        name: {what: total(rows, what) for what in ("files", "refused")}
        for name, rows in report.results.items()
    }


def main() -> None:
    report, here = Report("bad_files"), os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = {"configs": tried(of_configs(), CONFIG), "plans": tried(of_plans(), PLAN)}
        os.chdir(here)
    report.results |= found
    report.summarise(summary(report))


if __name__ == "__main__":
    main()

"""A run of gpt_nano in one process or more, with the seconds of its saves:
python -m benchmarks.shared.timed_run NUMBER COUNT HOST:PORT OUT SETTING ...

OUT/saves.json has the seconds of each save, by its step, as process 0 saw them.
"""

import pathlib
import sys
from unittest import mock

from benchmarks.runs import Watched
from experiments import train
from jaxmem._core.files import write_json
from jaxmem._train.runs import train as training


def main(number: str, count: str, coordinator: str, out: str, *settings: str) -> int:
    Watched.noted = {}
    place = ["--coordinator", coordinator, "--processes", count, "--process", number]
    with mock.patch.object(training, "Checkpoints", Watched):
        code = train.main(["gpt_nano", *settings, "--out", out, *(place if coordinator else [])])
    if number == "0":
        write_json(pathlib.Path(out) / "saves.json", Watched.noted)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""python -m experiments.train CONFIG [section.key=value ...] --out DIR [--overwrite]: plans for the
budget, trains, evaluates.

After the run, DIR has metrics.jsonl (a row for each step), summary.json, the last checkpoints and a
text that the model generated (sample.txt; not for a BERT). If the run has a plan, DIR also has
plan.json and report.html, a page about the run. The same command resumes a stopped run from its
last checkpoint. Exit codes: 0; 1 if a process of the run is missing or fails; 2 for input that
cannot be used; 3 if the loss is no longer finite; 130 after SIGINT; 143 after SIGTERM.
"""

import sys
from collections.abc import Sequence

from experiments.config.text import Config
from experiments.running import program
from experiments.running.text import TEXT

PROGRAM = "experiments.train"
DESCRIPTION = "Train an experiment under a plan for its budget, then evaluate it."


def main(argv: Sequence[str] | None = None) -> int:
    return program.main(PROGRAM, DESCRIPTION, Config, TEXT, argv)


if __name__ == "__main__":
    sys.exit(main())

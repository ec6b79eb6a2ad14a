"""python -m experiments.train_glue CONFIG [section.key=value ...] --out DIR [--overwrite]:
fine-tunes a BERT on a GLUE task.

`data.path` is the folder of the GLUE download, `data.task` one of its tasks. Plans for the budget
as `train.py` does, trains, then computes the task's GLUE metrics on all validation examples.
Parameters start at random, since experiments save no parameters. To start from pretrained
ones, pass them to `running.glue.glue_experiment`. Results and exit codes are as in `train.py`.
"""

import sys
from collections.abc import Sequence

from experiments.config.glue import GlueConfig
from experiments.running import program
from experiments.running.glue import GLUE

PROGRAM = "experiments.train_glue"
DESCRIPTION = "Fine-tune a BERT on a GLUE task, then evaluate it."


def main(argv: Sequence[str] | None = None) -> int:
    return program.main(PROGRAM, DESCRIPTION, GlueConfig, GLUE, argv)


if __name__ == "__main__":
    sys.exit(main())

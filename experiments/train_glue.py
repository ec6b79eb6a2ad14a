"""python -m experiments.train_glue CONFIG [section.key=value ...] --out DIR [--overwrite]:
fine-tunes a BERT on a GLUE task.

`data.path` is the folder of the GLUE download, `data.task` one of its tasks. Plans for the budget
as `train.py` does, trains, then computes the task's GLUE metrics on all validation examples.
Parameters start at random, since experiments save no parameters. To start from pretrained
ones, pass them to `running.glue.glue_experiment`. Results and exit codes are as in `train.py`.
"""

import sys
from collections.abc import Sequence

from experiments.command import cli
from experiments.config.glue import GlueConfig
from experiments.running.glue import GLUE
from experiments.running.run import run

PROGRAM = "experiments.train_glue"


def main(argv: Sequence[str] | None = None) -> int:
    description = "Fine-tune a BERT on a GLUE task, then evaluate it."
    args = cli.parser(PROGRAM, description).parse_intermixed_args(argv)

    def work() -> None:
        config, again = cli.settings(args, GlueConfig), cli.again(PROGRAM, args)
        named = {"name": cli.name(args), "command": again}
        with cli.told_of(args):
            run(GLUE, config, cli.out(args), overwrite=args.overwrite, **named)

    return cli.exit_code(work)


if __name__ == "__main__":
    sys.exit(main())

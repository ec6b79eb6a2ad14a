"""python -m experiments.train CONFIG [section.key=value ...] --out DIR [--overwrite]: plans for the
budget, trains, evaluates.

When it has ended, DIR holds metrics.jsonl (a row a step), summary.json, the last checkpoints, a
text that the model made up (sample.txt; not of a BERT) and, where there is a plan, plan.json and a
page about the run, report.html. A run that was stopped goes on where it was saved last when the
same command is given again. Exit codes: 0; 2 for input that cannot be used; 3 where the loss is no
longer finite; 130 and 143 where SIGINT and SIGTERM ended it.
"""

import sys
from collections.abc import Sequence

from experiments.command import cli
from experiments.config.text import Config
from experiments.running.run import run
from experiments.running.text import TEXT

PROGRAM = "experiments.train"


def main(argv: Sequence[str] | None = None) -> int:
    description = "Train an experiment under a plan for its budget, then evaluate it."
    args = cli.parser(PROGRAM, description).parse_intermixed_args(argv)

    def work() -> None:
        config, again = cli.settings(args, Config), cli.again(PROGRAM, args)
        named = {"name": cli.name(args), "command": again}
        with cli.told_of(args):
            run(TEXT, config, cli.out(args), overwrite=args.overwrite, **named)

    return cli.exit_code(work)


if __name__ == "__main__":
    sys.exit(main())

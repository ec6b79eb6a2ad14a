"""python -m experiments.train CONFIG [section.key=value ...] --out DIR [--overwrite]: plans for the
budget, trains, evaluates.

After the run, DIR has metrics.jsonl (a row for each step), summary.json, the last checkpoints and a
text that the model generated (sample.txt; not for a BERT). If the run has a plan, DIR also has
plan.json and report.html, a page about the run. The same command resumes a stopped run from its
last checkpoint. Exit codes: 0; 2 for input that cannot be used; 3 if the loss is no longer finite;
130 after SIGINT; 143 after SIGTERM.
"""

import sys
from collections.abc import Sequence

from experiments.command import cli, processes
from experiments.config.text import Config
from experiments.running.run import run
from experiments.running.text import TEXT

PROGRAM = "experiments.train"


def main(argv: Sequence[str] | None = None) -> int:
    description = "Train an experiment under a plan for its budget, then evaluate it."
    parser = cli.parser(PROGRAM, description)
    processes.options(parser)
    args = parser.parse_intermixed_args(argv)

    def work() -> None:
        processes.join(args)
        config, again = cli.settings(args, Config), cli.again(PROGRAM, args)
        named = {"name": cli.name(args), "command": again}
        with cli.told_of(args):
            run(TEXT, config, cli.out(args), overwrite=args.overwrite, **named)

    return cli.exit_code(work)


if __name__ == "__main__":
    sys.exit(main())

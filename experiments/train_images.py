"""python -m experiments.train_images CONFIG [section.key=value ...] --out DIR [--overwrite]: trains
a ResNet, evaluates it.

After the run, DIR has metrics.jsonl (a row for each step) and summary.json. Exit codes are as in
`train.py`.
"""

import sys
from collections.abc import Sequence

from experiments.command import cli
from experiments.config.images import ImageConfig
from experiments.running.images import IMAGES
from experiments.running.run import run

PROGRAM = "experiments.train_images"


def main(argv: Sequence[str] | None = None) -> int:
    description = "Train a ResNet to classify images, then evaluate it."
    args = cli.parser(PROGRAM, description).parse_intermixed_args(argv)

    def work() -> None:
        config, again = cli.settings(args, ImageConfig), cli.again(PROGRAM, args)
        named = {"name": cli.name(args), "command": again}
        with cli.told_of(args):
            run(IMAGES, config, cli.out(args), overwrite=args.overwrite, **named)

    return cli.exit_code(work)


if __name__ == "__main__":
    sys.exit(main())

"""python -m experiments.train_images CONFIG [section.key=value ...] --out DIR [--overwrite]: trains
a ResNet, evaluates it.

After the run, DIR has metrics.jsonl (a row for each step) and summary.json. Exit codes are as in
`train.py`.
"""

import sys
from collections.abc import Sequence

from experiments.config.images import ImageConfig
from experiments.running import program
from experiments.running.images import IMAGES

PROGRAM = "experiments.train_images"
DESCRIPTION = "Train a ResNet to classify images, then evaluate it."


def main(argv: Sequence[str] | None = None) -> int:
    return program.main(PROGRAM, DESCRIPTION, ImageConfig, IMAGES, argv)


if __name__ == "__main__":
    sys.exit(main())

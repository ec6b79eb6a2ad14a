"""python -m experiments.plan CONFIG [section.key=value ...] --budget B --target T --out DIR
[--overwrite]: plans, prints the table, writes DIR/plan.json.
"""

import sys
from collections.abc import Sequence

from experiments.command import cli
from experiments.config.text import Config
from experiments.running.planning import plan_into

BUDGET = 'bytes, "12GiB" or "90%%", as plan.budget (default: the config\'s; else the usable memory)'
TARGET = '"local", or a GPU such as "h200", as plan.target (default: the config\'s)'


def main(argv: Sequence[str] | None = None) -> int:
    description = "Plan an experiment's training step for a budget and a target; train nothing."
    parser = cli.parser("experiments.plan", description)
    parser.add_argument("--budget", help=BUDGET)
    parser.add_argument("--target", help=TARGET)
    args = parser.parse_intermixed_args(argv)
    for key in ("budget", "target"):
        if (value := getattr(args, key)) is not None:
            args.overrides.append(f"plan.{key}={value}")

    def work() -> None:
        config = cli.settings(args, Config)
        with cli.told_of(args):
            plan_into(config, cli.out(args), args.overwrite)

    return cli.exit_code(work)


if __name__ == "__main__":
    sys.exit(main())

"""python -m experiments.plan CONFIG --budget B --target T --out DIR: plans, prints the table,
writes DIR/plan.json.
"""

import pathlib
import sys
from collections.abc import Sequence

from experiments.command import cli
from experiments.config.text import Config
from experiments.errors import InputError
from experiments.running.planning import UNPLANNED, new_plan
from experiments.running.record import check_folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(
        "experiments.plan",
        "Plan an experiment's training step for a budget and a target; train nothing.",
    )
    parser.add_argument(
        "--budget", help='bytes, "12GiB" or "90%%" (default: the config\'s; else the usable memory)'
    )
    parser.add_argument(
        "--target", help='"local", or a named GPU such as "h200" (default: the config\'s)'
    )
    args = parser.parse_intermixed_args(argv)

    def work() -> None:
        config = cli.settings(args.config, args.overrides)
        out = check_folder(args.out or pathlib.Path("runs") / pathlib.Path(args.config).stem)
        plan_only(config, args.budget, args.target, out)

    return cli.exit_code(work)


def plan_only(config: Config, budget: str | None, target: str | None, out: pathlib.Path) -> None:
    wanted = config.plan.budget if budget is None else int(budget) if budget.isdecimal() else budget
    if wanted == UNPLANNED:
        raise InputError(
            "plan.budget: got 'none'; allowed here: a number of bytes, a text such as '12GiB' or"
            " '90%'"
        )
    if config.remat.policy != "plan":
        raise InputError(
            f"remat.policy: got {config.remat.policy!r}; allowed here: 'plan', since nothing else"
            " is planned"
        )
    plan = new_plan(config, wanted, target or config.plan.target)
    print(plan)
    try:
        plan.save(out / "plan.json")
    except OSError as error:
        raise InputError(f"--out: cannot write to {str(out)!r}: {error}") from error
    print(f"wrote {out / 'plan.json'}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

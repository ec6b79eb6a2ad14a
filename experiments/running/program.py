"""The command that trains one kind of experiment, in one process or in several."""

import argparse
from collections.abc import Sequence
from typing import Any, TypeVar

from experiments.command import cli, processes
from experiments.command.address import options
from experiments.config.sections import Trained
from experiments.running.run import Experiment, run

C = TypeVar("C", bound=Trained)


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """Returns the parser of a config, of settings, and of the place among several processes."""
    made = cli.parser(program, description)
    options(made)
    return made


def main(
    program: str,
    description: str,
    schema: type[C],
    experiment: Experiment[C, Any],
    argv: Sequence[str] | None,
) -> int:
    """Joins the processes, trains and evaluates by a command line, and returns the exit code.

    program: the module of the command. schema: the settings of `experiment`.
    """
    args = parser(program, description).parse_intermixed_args(argv)

    def work() -> None:
        processes.join(args)
        config, again = cli.settings(args, schema), cli.again(program, args)
        named = {"name": cli.name(args), "command": again}
        with cli.told_of(args):
            run(experiment, config, cli.out(args), overwrite=args.overwrite, **named)

    return cli.exit_code(work)

"""The `jaxmem` command: reads its line, hands it to `jaxmem/_cli/commands.py`, and tells errors in
one message.

Exit codes: 0; 1 where `doctor` found something amiss; 2 for input that cannot be used; 130 where
interrupted. JAX is imported by the commands that need it, so that `--help` is quick.
"""

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Sequence

from jaxmem._core.progress import progress as progress

BAD_INPUT, INTERRUPTED = 2, 130
STEP = (
    "where FUNCTION takes nothing and returns (build, *args), as jaxmem.plan gets them;"
    " FILE.py:FUNCTION will do too"
)
BUDGET = (
    'bytes of the whole step on one device, "12GiB", or "90%%" of the usable memory (default: all'
    " of it)"
)
TARGET = (
    'the device to plan for: "local" (default), a GPU such as h200, or a100-80gb:8 (`jaxmem'
    " targets`)"
)


class Parser(argparse.ArgumentParser):
    """argparse, with the nearest command or option named where one is unknown."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str):
        words = message.replace("'", " ").replace("=", " ").split()
        known = [o for a in self._actions for o in (*a.option_strings, *(a.choices or ()))]
        unknown = [w for w in words if w not in known and not w.endswith(":")]
        near = [
            n
            for w in unknown
            if len(w) > 2
            for n in difflib.get_close_matches(w, known, n=1, cutoff=0.7)
        ]
        unrecognized = message.startswith(("unrecognized", "argument COMMAND"))
        hint = f"; did you mean {near[0]}?" if near and unrecognized else ""
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}{hint}\n{self.format_usage()}")


def parser() -> argparse.ArgumentParser:
    top = Parser(
        "jaxmem",
        description="Fit a JAX training step into a byte budget at the least cost in time.",
    )
    commands = top.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        made.set_defaults(parser=made)
        made.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return made

    one = command(
        "plan", "choose an action for every tagged tensor, and compile the step within the budget"
    )
    one.add_argument("step", metavar="MODULE:FUNCTION", help=STEP)
    one.add_argument("--budget", metavar="B", help=BUDGET)
    one.add_argument("--host-budget", metavar="B", help="the same for tensors in host memory")
    one.add_argument("--target", metavar="T", default="local", help=TARGET)
    one.add_argument(
        "--actions",
        metavar="A",
        default="all",
        help='"all", "lossless", or a list such as keep,recompute,offload',
    )
    one.add_argument("--out", metavar="FILE", help="write the plan here, as JSON")
    one.add_argument("--report", metavar="FILE", help="write a page about the plan here, as HTML")
    one.add_argument("--json", action="store_true", help="print the plan as JSON, not as a table")

    one = command("explain", "tell what holds the peak of a step's memory, by name")
    one.add_argument("step", metavar="MODULE:FUNCTION", help=STEP)
    one.add_argument("--plan", metavar="FILE", help="under this plan (default: everything kept)")
    one.add_argument(
        "--target", metavar="T", help=TARGET.replace("(default)", "(default: the plan's, or this)")
    )
    one.add_argument("--json", action="store_true", help="print JSON")

    one = command("show", "print a plan as a table")
    one.add_argument("plan", metavar="PLAN.json")
    one.add_argument("--json", action="store_true", help="print it as JSON: the file, checked")

    one = command("diff", "print what differs between two plans")
    one.add_argument("first", metavar="A.json")
    one.add_argument("second", metavar="B.json")

    one = command(
        "report", "write a page, HTML in one file, about runs of experiments or about plans"
    )
    one.add_argument(
        "runs", metavar="RUN", nargs="+", help="a folder with plan.json, or a plan's file"
    )
    one.add_argument(
        "--out", metavar="FILE", help="the page (default: report.html in the first folder)"
    )

    one = command("targets", "list the devices that can be planned for")
    one.add_argument("--json", action="store_true", help="print JSON")

    one = command(
        "calibrate", "replace a GPU's datasheet rates by those that a check on it measured"
    )
    one.add_argument(
        "folder", metavar="DIR", help="what `python -m experiments.gpu_check --out DIR` left"
    )
    one.add_argument("--out", metavar="FILE", help="write here (default: the package's own data)")

    one = command("doctor", "look at versions, devices and settings, and say what is amiss")
    one.add_argument("--json", action="store_true", help="print JSON")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args, unknown = parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    try:
        from jaxmem._cli import commands as _commands
        from jaxmem.errors import JaxmemError

        try:
            return getattr(_commands, args.command)(args)
        except (JaxmemError, OSError) as error:
            if args.debug or isinstance(error, BrokenPipeError):
                raise
            print(f"jaxmem {args.command}: error: {error}", file=sys.stderr)
            return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `jaxmem show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())

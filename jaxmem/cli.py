"""The `jaxmem` command: reads its line, runs the command, and reports an error in one message.

Exit codes: 0; 1 where `doctor` found something amiss; 2 for input that cannot be used, the user's
own code included; 130 where interrupted. JAX is imported by the commands that need it.
"""

import argparse
import io
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from jaxmem._cli.output import say
from jaxmem._cli.parser import BAD_INPUT, parser
from jaxmem._core.progress import progress as progress

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv`, or the process's own line, asks for; returns the exit code.

    Characters that the encoding of standard output lacks are printed as "?". A closed stream, as of
    `jaxmem show plan.json >&-`, receives nothing.
    """
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # Unknown arguments are refused here and not by `parse_args`, so that the error shows the
    # command's usage and not `jaxmem`'s.
    args, unknown = parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code = _run(args)
            sys.stdout.flush()  # here, where a reader that is gone is no error
            return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    # `jaxmem show | head`: Python flushes standard output once more at its end, so that goes
    # nowhere.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, SystemExit) as error:
        return _tell(error, args)


def _run(args: argparse.Namespace) -> int:
    """Calls the command's function, which has the command's name, and returns the exit code: 0 if
    the function returns none. The module that holds the function is imported here, so that commands
    which need no JAX import none.
    """
    match args.command:
        case "plan" | "verify" | "estimate" | "explain":
            from jaxmem._cli import steps as commands
        case "show" | "diff" | "report":
            from jaxmem._cli import plans as commands
        case _:
            from jaxmem._cli import machine as commands
    return getattr(commands, args.command)(args) or 0


def _tell(error: BaseException, args: argparse.Namespace) -> int:
    """Prints an error that was foreseen as one message, and returns the exit code. Any other error
    is raised again, for its traceback.
    """
    from jaxmem._cli.errors import message

    said = message(error)
    if said is None:
        print("jaxmem did not foresee this error: please report it, as it is", file=sys.stderr)
        raise error
    if getattr(args, "debug", False):
        traceback.print_exception(error)
    # The library's messages begin with the function that failed, which is often the command's name.
    said = said.removeprefix(f"{args.command}: ")
    say(f"jaxmem {args.command}: error: {said}", sys.stderr)
    return BAD_INPUT


def _warn(message, *_, **__) -> None:
    """Shows a warning's text alone, where Python would show the line of code too."""
    say(f"warning: {message}", sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

"""What the command lines share: their options, settings, errors in one message, exit codes."""

import argparse
import contextlib
import pathlib
import shlex
import signal
import sys
import typing
import warnings
from collections.abc import Callable, Iterator

import jax
import pydantic

import jaxmem
from experiments.command.load import find, load, parse_override
from experiments.command.mistakes import placed
from experiments.errors import BAD_INPUT, DIVERGED, SIGNALLED, DivergedError, InputError

C = typing.TypeVar("C", bound=pydantic.BaseModel)


def parser(program: str, description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"python -m {program}", description=description, allow_abbrev=False
    )
    made.add_argument("config", help="a TOML file, or the name of one in configs/")
    made.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings on top, such as train.steps=20",
    )
    made.add_argument(
        "--out", metavar="DIR", help="where results go (default: runs/ and the config's name)"
    )
    made.add_argument(
        "--overwrite", action="store_true", help="let the results of an earlier run in DIR go"
    )
    return made


def settings(args: argparse.Namespace, schema: type[C]) -> C:
    """The config that a command line gives, with JAX set to 64 bits where it computes in them."""
    config = load(args.config, args.overrides, schema)
    if config.model.dtype == "float64":  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_enable_x64", True)
    return config


@contextlib.contextmanager
def told_of(args: argparse.Namespace) -> Iterator[None]:
    """Names the config's file, and the override, in an InputError of the statement: settings may be
    in order as such, and be refused for the data or the device that they name.
    """
    try:
        yield
    except InputError as error:
        sources = {parse_override(text)[0]: text for text in args.overrides}
        error.args = (placed(str(error), str(find(args.config)), sources),)  # its notes stay
        raise


def name(args: argparse.Namespace) -> str:
    return pathlib.Path(args.config).stem


def out(args: argparse.Namespace) -> pathlib.Path:
    return pathlib.Path(args.out or pathlib.Path("runs") / name(args))


def again(program: str, args: argparse.Namespace) -> str:
    """The command line that makes the run again."""
    words = ["python", "-m", program, args.config, *args.overrides, "--out", str(out(args))]
    return shlex.join(words)


def exit_code(main: Callable[[], object]) -> int:
    """Runs `main`: 0, or the code of what stopped it, told in one message without a traceback."""
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    try:
        main()
    except (InputError, DivergedError, jaxmem.errors.JaxmemError) as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
        print(f"error: {said}", file=sys.stderr)
        return DIVERGED if isinstance(error, DivergedError) else BAD_INPUT
    except KeyboardInterrupt as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", ())]).strip("; ")
        print(f"interrupted: {said}" if said else "interrupted", file=sys.stderr)
        return SIGNALLED + getattr(error, "number", signal.SIGINT)
    return 0

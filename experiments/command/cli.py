"""Common code of the command lines: options, settings, errors in one message, exit codes."""

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
from experiments.errors import (
    BAD_INPUT,
    DIVERGED,
    FAILED,
    SIGNALLED,
    AbsentError,
    DivergedError,
    InputError,
)

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
        help="settings that replace the file's, such as train.steps=20",
    )
    made.add_argument(
        "--out", metavar="DIR", help="folder of the results (default: runs/ and the config's name)"
    )
    made.add_argument(
        "--overwrite", action="store_true", help="replace the results of an earlier run in DIR"
    )
    return made


def settings(args: argparse.Namespace, schema: type[C]) -> C:
    """Returns the config of a command line. Enables 64 bits in JAX if its dtype is float64."""
    config = load(args.config, args.overrides, schema)
    if config.model.dtype == "float64":  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_enable_x64", True)
    return config


@contextlib.contextmanager
def told_of(args: argparse.Namespace) -> Iterator[None]:
    """Adds the config's file and the override to an InputError of the `with` block: valid settings
    may name data or a device that cannot be used.
    """
    try:
        yield
    except InputError as error:
        sources = {parse_override(text)[0]: text for text in args.overrides}
        error.args = (placed(str(error), str(find(args.config)), sources),)  # keeps the notes
        raise


def name(args: argparse.Namespace) -> str:
    return pathlib.Path(args.config).stem


def out(args: argparse.Namespace) -> pathlib.Path:
    return pathlib.Path(args.out or pathlib.Path("runs") / name(args))


def again(program: str, args: argparse.Namespace) -> str:
    """Returns the command line that repeats the run."""
    words = ["python", "-m", program, args.config, *args.overrides, "--out", str(out(args))]
    return shlex.join(words)


def exit_code(main: Callable[[], object]) -> int:
    """Runs `main` and returns 0, or reports its error in one message and returns an exit code."""
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    try:
        main()
    except (InputError, AbsentError, DivergedError, jaxmem.errors.JaxmemError) as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
        print(f"error: {said}", file=sys.stderr)
        codes = {AbsentError: FAILED, DivergedError: DIVERGED}
        return codes.get(type(error), BAD_INPUT)
    except KeyboardInterrupt as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", ())]).strip("; ")
        print(f"interrupted: {said}" if said else "interrupted", file=sys.stderr)
        return SIGNALLED + getattr(error, "number", signal.SIGINT)
    return 0

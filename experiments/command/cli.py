"""What both command lines share: settings, warnings and errors in one line, exit codes."""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence

import jax

import jaxmem
from experiments.command.load import load
from experiments.config.text import Config
from experiments.errors import BAD_INPUT, DIVERGED, INTERRUPTED, DivergedError, InputError


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
    return made


def settings(name: str, overrides: Sequence[str]) -> Config:
    return in_its_dtype(load(name, overrides))


def in_its_dtype(config):
    """The config, with JAX set to 64 bits where it computes in them."""
    if config.model.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    return config


def exit_code(main: Callable[[], None]) -> int:
    """Runs `main`: 0, or the code of what stopped it, told in one message without a traceback."""
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    try:
        main()
    except (InputError, jaxmem.errors.JaxmemError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except DivergedError as error:
        print(f"error: {error}", file=sys.stderr)
        return DIVERGED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0

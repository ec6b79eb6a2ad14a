"""Runs programs of `tests/`, whose function `main` takes the arguments as text. What it returns is
printed as JSON.

    python -m tests.shared.worker MODULE ARGUMENT ...
    python -m tests.shared.worker

Without a module, the process imports JAX once and runs one program after another;
tests/shared/children.py starts it.

A line of JSON on standard input is a program: its module, its arguments and its environment. The
answer is a line on standard output: what the program printed, or the traceback of its error.
"""

import contextlib
import io
import json
import os
import runpy
import sys
import traceback

import jax


def run(module: str, *arguments: str) -> None:
    """Executes a module anew, and prints what its `main` returns."""
    found = runpy.run_module(module)["main"](*arguments)
    if found is not None:
        print(json.dumps(found))


def answer(module: str, arguments: list[str], environment: dict[str, str]) -> dict[str, str]:
    """Runs a program, and then resets the numerics that the program set."""
    os.environ.clear()
    os.environ.update(environment)
    numerics = jax.config.jax_enable_x64
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            run(module, *arguments)
    except BaseException:
        return {"error": traceback.format_exc()}
    finally:
        jax.config.update("jax_enable_x64", numerics)
    return {"printed": printed.getvalue()}


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    run(*sys.argv[1:]) if sys.argv[1:] else main()

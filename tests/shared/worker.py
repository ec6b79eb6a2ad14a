"""Runs programs of `tests/` one after another in a process that has imported JAX once:
`python -m tests.shared.worker`, started by tests/shared/children.py.

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


def answer(module: str, arguments: list[str], environment: dict[str, str]) -> dict[str, str]:
    """Runs a program as `python -m` does, and then resets the numerics that the program set."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    numerics = jax.config.jax_enable_x64
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_module(module, run_name="__main__")
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
    main()

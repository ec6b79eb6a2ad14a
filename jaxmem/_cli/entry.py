"""Finds the step to plan, `(build, *args)`, by MODULE:FUNCTION on a command line.

Importing and calling run the user's code. An error of that code becomes the cause of a StepError,
and `errors.py` reads the user's line from the cause.
"""

import difflib
import functools
import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType

from jaxmem._trace.signature import refusal
from jaxmem._trace.step import described
from jaxmem.errors import JaxmemError, StepError

EXPECTED = (
    "expected MODULE:FUNCTION, such as 'train:planned' or 'path/to/train.py:planned', where"
    " FUNCTION takes nothing and returns (build, *args); (step, *args) with --auto"
)


def load_entry(name: str) -> tuple[Callable, tuple]:
    """Calls the function that `name` points to, and returns the two parts of its result: `build`
    (with --auto the step itself), and the step's arguments.

    Raises StepError if there is no such module or function, or if its result is of another form. An
    error of the user's code, here or later in `build`, is the cause of a StepError.
    """
    # The last colon divides: a path may hold others.
    module_name, colon, function_name = name.rpartition(":")
    relative = module_name.startswith(".") and not module_name.endswith(".py")
    if not (colon and module_name and function_name) or relative:
        raise _entry_error(f"got {name!r}")
    module = _module(name, module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        what = "is no function" if hasattr(module, function_name) else "is not in it"
        hint = _nearest(function_name, known)
        raise _entry_error(f"{name!r}: {function_name!r} {what}{hint}")
    if refused := refusal(function):
        raise _entry_error(f"{name!r} takes {refused[0]}")
    result = _called(f"MODULE:FUNCTION: {name!r}", function)
    if not isinstance(result, tuple) or not result or not callable(result[0]):
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise _entry_error(f"{name!r} returned {got}")
    return _with_errors_told(result[0]), result[1:]


def _with_errors_told(build: Callable) -> Callable:
    """`build`, with a StepError for its errors."""

    @functools.wraps(build)  # with its signature, which the planner looks at
    def told(*args, **named):
        return _called("plan: `build`", build, *args, **named)

    return told


def _called(what: str, function: Callable, *args, **named):
    """Calls the user's function. Raises StepError from its errors; jaxmem's own errors pass.

    what: the name of the function in the error.
    """
    try:
        return function(*args, **named)
    except JaxmemError:
        raise
    except Exception as error:
        raise StepError(f"{what} raised {described(error)}") from error


def _module(name: str, module: str) -> ModuleType:
    """Imports a module by its name, or by its file's path if it ends in `.py`.

    `name` is the whole MODULE:FUNCTION, for errors.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: modules of the current folder
    path = pathlib.Path(module)
    if module.endswith(".py") and not path.is_file():
        scripts = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise _entry_error(f"{name!r}: there is no such file here{_nearest(module, scripts)}")
    try:
        return _from_file(path) if module.endswith(".py") else importlib.import_module(module)
    except JaxmemError:
        raise
    except Exception as error:
        # Only the requested module may be misspelt. A module that it imports and that is missing is
        # an error of the user's code.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            near = _nearest(module, [p.stem for p in pathlib.Path().glob("*.py")])
            raise _entry_error(f"{name!r}: there is no such module here{near}") from None
        raise StepError(
            f"MODULE:FUNCTION: {name!r}: importing it raised {described(error)}"
        ) from error


def _entry_error(what: str) -> StepError:
    """The error for a `MODULE:FUNCTION` that names no step."""
    return StepError(f"MODULE:FUNCTION: {what}; {EXPECTED}")


def _from_file(path: pathlib.Path) -> ModuleType:
    """Imports a file under its name without `.py`, as `import` would find it from its folder."""
    path = path.absolute()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))  # as `python file.py` does
    spec.loader.exec_module(module)
    return module


def _nearest(word: str, known: list[str]) -> str:
    """A hint at the nearest known word; empty if none is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""

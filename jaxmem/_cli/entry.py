"""MODULE:FUNCTION on a command line -> the step to plan: `(build, *args)`."""

import difflib
import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType

from jaxmem.errors import StepError

EXPECTED = (
    "expected MODULE:FUNCTION, such as 'train:planned' or 'path/to/train.py:planned', where"
    " FUNCTION takes nothing and returns (build, *args)"
)


def load_entry(name: str) -> tuple[Callable, tuple]:
    """`build` and its step's arguments, from what the function that `name` points to returns.

    Raises StepError if there is no such module or function, or it returns something else.
    """
    module_name, colon, function_name = name.rpartition(":")
    if not (colon and module_name and function_name):
        raise StepError(f"MODULE:FUNCTION: got {name!r}; {EXPECTED}")
    module = _module(name, module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = difflib.get_close_matches(function_name, known, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]}?" if near else ""
        what = "is no function" if hasattr(module, function_name) else "is not in it"
        raise StepError(f"MODULE:FUNCTION: {name!r}: {function_name!r} {what}{hint}; {EXPECTED}")
    try:
        result = function()
    except Exception as error:
        raise StepError(
            f"MODULE:FUNCTION: {name!r} raised {type(error).__name__}: {error}; {EXPECTED}"
        ) from error
    if not isinstance(result, tuple) or not result or not callable(result[0]):
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise StepError(f"MODULE:FUNCTION: {name!r} returned {got}; {EXPECTED}")
    return result[0], result[1:]


def _module(name: str, module: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: modules of the current folder
    try:
        return (
            _from_file(pathlib.Path(module))
            if module.endswith(".py")
            else importlib.import_module(module)
        )
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]
        why = (
            "there is no such module here"
            if missing
            else f"importing it raised {type(error).__name__}: {error}"
        )
        raise StepError(f"MODULE:FUNCTION: {name!r}: {why}; {EXPECTED}") from error


def _from_file(path: pathlib.Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.absolute()))  # as `python file.py` does
    spec.loader.exec_module(module)
    return module

"""Makes an error into the command's message: the text of the error and, if the user's own code
raised it, the line of that code.
"""

import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxmem.errors import JaxmemError

# names of folders that hold installed packages
_INSTALLED = {"site-packages", "dist-packages"}


def message(error: BaseException) -> str | None:
    """The message about an error for the user. None for an error that jaxmem does not expect."""
    # First: JAX raises a plain RuntimeError, which would give no message below.
    if (text := _no_device(error)) is not None:
        return text
    if isinstance(error, SystemExit):
        code = "" if error.code is None else repr(error.code)
        text = (
            f"the code that is planned called sys.exit({code}); expected that it returns: what ends"
            ' the program belongs under `if __name__ == "__main__":`'
        )
    elif isinstance(error, JaxmemError | OSError):
        text = str(error)
    else:
        return None
    if (where := _where(error)) is None:
        return text
    return text + ("\n" if "\n" in text else " ") + f"({where}; --debug shows the traceback)"


def _where(error: BaseException) -> str | None:
    """The innermost line of the user's code that `error` comes from, as `path:line, in function`.

    jaxmem raises its own errors from the user's errors, so the cause comes first. None if no line
    belongs to the user.
    """
    cause = error.__cause__ if isinstance(error, JaxmemError) else None
    if cause is not None and (inner := _where(cause)) is not None:
        return inner
    frame = next(filter(None, map(_frame, _chain(error))), None)
    if frame is None:
        return None
    path, line, name = frame
    near = os.path.relpath(path)
    shown = path if near.startswith(os.pardir) else near
    return f"{shown}:{line}" + ("" if name == "<module>" else f", in {name}")


def _frame(error: BaseException) -> tuple[str, int, str] | None:
    """File, line and function of the innermost frame of the traceback in the user's code; None if
    there is no such frame.
    """
    # The line of a SyntaxError never ran, and so is in no frame.
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return os.path.abspath(error.filename), error.lineno or 1, "<module>"
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_users(frame.f_code.co_filename):
            found = os.path.abspath(frame.f_code.co_filename), line, frame.f_code.co_name
    return found


def _is_users(filename: str) -> bool:
    """Whether a file is neither jaxmem's, nor an installed package's, nor Python's own."""
    if filename.startswith("<"):  # such as "<string>" or "<frozen importlib._bootstrap>"
        return False
    path = Path(os.path.abspath(filename))
    return not (_INSTALLED.intersection(path.parts) or any(map(path.is_relative_to, _not_users())))


def _not_users() -> set[str]:
    """The folders of jaxmem, wherever it is installed, and of Python's own library."""
    specs = map(importlib.util.find_spec, ("jaxmem", "jaxmem_kernels"))  # imports neither
    ours = {folder for spec in specs if spec for folder in spec.submodule_search_locations or ()}
    return ours | {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then its cause, the cause of the cause, and so on, as in Python's traceback."""
    # compared by identity, so that a chain which closes to a ring ends
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and not any(one is other for other in seen):
        seen.append(one)
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _no_device(error: BaseException) -> str | None:
    """The message if JAX_PLATFORMS names a platform that this machine lacks; otherwise None.

    JAX raises a RuntimeError, or fails an assertion without a text. So its devices are listed again
    here.
    """
    jax: Any = sys.modules.get("jax")  # if JAX was not imported, it did not fail
    asked = jax and jax.config.jax_platforms
    if not asked or not any(type(one) in (RuntimeError, AssertionError) for one in _chain(error)):
        return None
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as none:
        why = f": {none}" if str(none) else ""
        return (
            f"JAX_PLATFORMS is {asked!r}, and JAX finds no such device here{why}; set it to what"
            " this machine has, such as cpu, or unset it (`jaxmem doctor` tells more; --debug shows"
            " the traceback)"
        )
    return None

"""Warnings that point at the user's line, however deep in jaxmem they are raised.

`warn` searches the call stack for the first frame that is not jaxmem's. The alternative, a fixed
`stacklevel`, was right for one caller only.
"""

import sys
import warnings
from collections.abc import Callable
from typing import TypeVar

from jaxmem.errors import JaxmemWarning

T = TypeVar("T")


def warn(message: str) -> None:
    """A JaxmemWarning at the innermost line of the call stack that is not jaxmem's own."""
    # Level 1 is this function, 2 its caller. The loop ends at the first frame of other code.
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, JaxmemWarning, stacklevel=level)


def _is_ours(module: str) -> bool:
    """Whether a frame of this module is skipped: our own, or one that runs our context managers."""
    return module.partition(".")[0] in ("jaxmem", "jaxmem_kernels", "contextlib")


def silently(call: Callable[[], T]) -> T:
    """The result of `call`, without jaxmem's warnings, which an earlier call has shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JaxmemWarning)
        return call()

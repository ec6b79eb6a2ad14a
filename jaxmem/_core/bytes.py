"""Byte budgets: a number of bytes, "12GiB", or "90%" of the usable memory."""

import math
import re

from jaxmem.errors import BudgetError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_EXPECTED = (
    'expected a positive number of bytes, a text such as "12GiB" or "800MB", or a share of the'
    ' usable memory such as "90%"'
)


def parse_budget(budget, usable_bytes: int, argument: str = "budget") -> int:
    """Bytes of `budget`; None means all of `usable_bytes`. Raises BudgetError if it cannot be read
    or is not positive.
    """
    if budget is None:
        return usable_bytes
    value = math.nan
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*|%)\s*", budget)
        if match and match[2] == "%":
            value = float(match[1]) / 100 * usable_bytes
            if float(match[1]) > 100:
                raise BudgetError(
                    f"{argument}: `{argument}` is {budget!r}, more than all of the usable memory;"
                    f" {_EXPECTED}"
                )
        elif match and match[2].lower() in _UNITS:
            value = float(match[1]) * _UNITS[match[2].lower()]
    elif isinstance(budget, (int, float)) and not isinstance(budget, bool):
        value = float(budget)
    elif hasattr(budget, "__index__") and not isinstance(budget, bool):  # numpy integers
        value = float(budget.__index__())
    if not math.isfinite(value) or value < 1:
        raise BudgetError(f"{argument}: `{argument}` is {budget!r}; {_EXPECTED}")
    return int(value)


def show_bytes(count: float) -> str:
    """`count` bytes for people: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError

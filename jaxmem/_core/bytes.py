"""Reads byte budgets as people write them, and writes bytes as people read them.

The library, the command and the experiments share this grammar.
"""

import decimal
import math
import numbers
import operator
import re
import unicodedata

from jaxmem.errors import BudgetError

MOST_BYTES = 2**63 - 1  # the greatest number of bytes in XLA and in every file format
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
# Unit in lower case -> bytes. Letters alone and with "b" are powers of 1000, with "i" of 1024.
_UNITS = {f"{letter}{end}": 1000**power for letter, power in _POWERS.items() for end in ("", "b")}
_UNITS |= {
    f"{letter}{end}": 1024**power
    for letter, power in _POWERS.items()
    for end in ("i", "ib")
    if letter
}
_SHOWN = ("B", "KiB", "MiB", "GiB", "TiB")
# Digits as in Python's literals, with underscores and an exponent. Its three digits bound the size
# of the number that is computed.
_NUMBER = r"(?:[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
_TEXT = re.compile(rf"\s*({_NUMBER})\s*([a-zA-Z]*|%)\s*")
_EXPECTED = (
    'expected a positive number of bytes such as 1_000_000 or "1.5e9", a text such as "12GiB" (2^30'
    ' bytes each), "12GB" or "12G" (both 10^9 each), or a share of the usable memory such as "90%"'
)


def parse_budget(budget, usable_bytes: int, argument: str = "budget") -> int:
    """Reads a byte budget, and returns its number of bytes.

    A budget is a number, or a text with a number and a unit. Case does not matter, and a space
    before the unit is allowed. `12GiB` and `12Gi` are 12 · 2^30 bytes. `12GB` and `12G` are 12 ·
    10^9 bytes. People use `12G` for both sizes. jaxmem reads the smaller size, so that a step
    within the budget fits both. A number without a unit is a number of bytes, in a text too.
    Underscores (`1_000_000`) and exponents (`1.5e9`) have the meaning that they have in Python.
    `90%` is a share of `usable_bytes`.

    budget: a number, a text or None. None means `usable_bytes`.
    usable_bytes: the bytes that 100 % stands for.
    argument: the name of the budget in error messages, such as "plan.budget" of a config.

    Raises BudgetError if the budget cannot be read, is not positive and finite, is less than one
    byte, or is more than 100 %.
    """
    if budget is None:
        return usable_bytes
    count = _read(budget, usable_bytes)
    if count is not None and 1 <= count <= MOST_BYTES:
        return int(count)
    raise BudgetError(
        f"`{argument}` is {budget!r}{_objection(budget, count, usable_bytes)}; {_EXPECTED}"
    )


def show_bytes(count: float) -> str:
    """`count` bytes for people: 1536 -> '1.5 KiB'."""
    power = 0
    # From 1023.95 on it would be rounded to 1024.0.
    while abs(count) >= 1023.95 and power < len(_SHOWN) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.1f} {_SHOWN[power]}" if power else f"{round(count)} B"  # an integer: no "-0"


def _read(budget, usable_bytes: int) -> decimal.Decimal | None:
    """The bytes of a budget, exact and not yet checked. None if the budget is neither a number nor
    the text of a number. Decimals are used, because floats would round large counts.
    """
    if isinstance(budget, bool):  # an integer to Python
        return None
    if isinstance(budget, str):
        match = _TEXT.fullmatch(budget)
        unit = match[2].lower() if match else ""
        if match is None or unit not in _UNITS.keys() | {"%"}:
            return None
        number = decimal.Decimal(match[1])
        if unit == "%":
            return number / 100 * usable_bytes if number <= 100 else None
        return number * _UNITS[unit]
    if isinstance(budget, numbers.Real) and not isinstance(budget, numbers.Integral):
        return decimal.Decimal(float(budget)) if math.isfinite(budget) else None
    try:  # integers of any library
        return decimal.Decimal(operator.index(budget))
    except TypeError:
        return None


def _objection(budget, count: decimal.Decimal | None, usable_bytes: int) -> str:
    """The fault of a refused budget, if it is known, or the budgets that were probably meant: the
    middle of an error's sentence.
    """
    if count is not None:
        return ", less than a byte" if count < 1 else f", more than {show_bytes(MOST_BYTES)}"
    if not isinstance(budget, str):
        return ""
    number, unit = _parts(budget)
    if unit == "%" and _TEXT.fullmatch(number + unit) and decimal.Decimal(number) > 100:
        return ", more than all of the usable memory"
    # A unit that is known was refused for its number, whose digits `_parts` has mended. In any
    # other unit the first letter gives the power, such as "G" of "Gigabytes".
    power = unit[:1].upper()
    known = unit.lower() in _UNITS or unit == "%"
    units = [unit] if known else [f"{power}iB", f"{power}B"] if power.lower() in _POWERS else []
    sizes = {number + end: _read(number + end, usable_bytes) for end in units}
    meant = [repr(text) for text, size in sizes.items() if 1 <= (size or 0) <= MOST_BYTES]
    return f": did you mean {' or '.join(meant)}?" if meant else ""


def _parts(text: str) -> tuple[str, str]:
    """Divides a refused text into number and unit, each in the spelling of `_TEXT`.

    Other spellings are replaced: full-width digits and superscripts, spaces and commas between
    thousands, and a comma before the fraction.
    """
    plain = unicodedata.normalize("NFKC", text).strip()
    end = len(plain) - len(plain.lstrip("+-0123456789.,_' "))
    number, unit = plain[:end].replace(" ", ""), plain[end:]
    number = re.sub(r"[,'](?=[0-9]{3}(?![0-9]))", "_", number).replace(",", ".")
    return number, unit

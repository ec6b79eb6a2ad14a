"""The codecs' arithmetic again, in numpy and one group at a time: no reshaping, packing or XLA."""

import numpy as np

DIGITS = {"bfloat16": 8, "float32": 24}  # of the significand
LEAST, LEAST_OFFSET = 2.0**-125, 2.0**-100
TWO_15THS = 8947849 * 2.0**-26  # rounded up, to float32's digits


def _rounded(value, digits: int, rounding) -> float:
    fraction, exponent = np.frexp(np.float64(value))
    return float(np.ldexp(rounding(np.ldexp(fraction, digits)), exponent - digits))


def symmetric(group: np.ndarray, scale: str) -> tuple[np.ndarray, float]:
    """Codes and scale of one group of finite float32 or float64 values."""
    stored = _stored(np.abs(group).max() / 8, DIGITS[scale])
    return _codes(group, stored), stored


def asymmetric(group: np.ndarray, scale: str) -> tuple[np.ndarray, float, float]:
    """Codes, scale and offset of one group of finite float32 or float64 values."""
    number, digits = group.dtype.type, DIGITS[scale]
    of_scale = min(digits, 21)  # whose product with a code is exact
    high, low = group.max() / number(2), group.min() / number(2)
    step = number(_stored((high - low) * number(TWO_15THS), of_scale))
    offset = _rounded((low + step * number(4)) * number(2), digits, np.rint)
    limit = 2.0**128 - 2.0 ** (128 - digits)
    offset = min(max(offset, -limit), limit)
    offset = number(offset if abs(offset) >= LEAST_OFFSET else 0)
    with np.errstate(over="ignore"):
        offset = offset if np.isfinite(offset - group.min()) else number(0)
        distance = group - offset
    above = (high - offset / number(2)) * (number(2) / number(7))
    below = (offset / number(2) - low) / number(4)
    stored = _stored(max(above, below), of_scale)
    return _codes(distance, stored), stored, float(offset)


def _stored(exact, digits: int) -> float:
    return _rounded(exact, digits, np.ceil) if exact >= LEAST else 0.0


def _codes(distance, stored: float) -> np.ndarray:
    if not stored:
        return np.zeros(distance.shape, int)
    return np.clip(np.rint(distance * (1 / distance.dtype.type(stored))), -8, 7).astype(int)


def outliers(x: np.ndarray) -> list[int]:
    """The channels of the last axis with Z > 3, greatest sum first."""
    s = np.array([np.abs(x[..., i].astype(np.float64)).sum() for i in range(x.shape[-1])])
    if s.std() == 0:
        return []
    z = (s - s.mean()) / s.std()
    return sorted((i for i in range(len(s)) if z[i] > 3), key=lambda i: -s[i])


def packed(q: np.ndarray) -> bytes:
    """Codes of one group (even number) as bytes: the first half in the low bits."""
    half = len(q) // 2
    return bytes((int(a) % 16) + 16 * (int(b) % 16) for a, b in zip(q[:half], q[half:]))


def bits(values: np.ndarray) -> bytes:
    """Bools of one group (a multiple of eight) as bytes: part i in bit i."""
    width = len(values) // 8
    return bytes(sum(int(values[i * width + j]) << i for i in range(8)) for j in range(width))

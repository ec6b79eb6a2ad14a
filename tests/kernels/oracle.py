"""The codecs' arithmetic again, in numpy and one group at a time: no reshaping, packing or XLA."""

import numpy as np

DIGITS = {"bfloat16": 8, "float32": 24}  # of the significand
LEAST, LEAST_OFFSET = 2.0**-125, 2.0**-100


def _rounded(value, digits: int, rounding) -> float:
    fraction, exponent = np.frexp(np.float64(value))
    return float(np.ldexp(rounding(np.ldexp(fraction, digits)), exponent - digits))


def symmetric(group: np.ndarray, scale: str) -> tuple[np.ndarray, float]:
    """Codes and scale of one group of finite float32 or float64 values."""
    return _codes(group, np.abs(group).max() / 8, DIGITS[scale])


def asymmetric(group: np.ndarray, scale: str) -> tuple[np.ndarray, float, float]:
    """Codes, scale and offset of one group of finite float32 or float64 values."""
    offset = _rounded(group.max() / 2 + group.min() / 2, DIGITS[scale], np.rint)
    offset = offset if abs(offset) >= LEAST_OFFSET else 0.0
    distance = group - group.dtype.type(offset)
    return *_codes(
        distance, np.abs(distance).max() / 8, min(DIGITS[scale], 21)
    ), offset  # whose product with a code is exact


def _codes(distance, exact, digits: int):
    stored = _rounded(exact, digits, np.ceil) if exact >= LEAST else 0.0
    q = np.zeros(distance.shape, int)
    if stored:
        q = np.clip(np.rint(distance * (1 / distance.dtype.type(stored))), -8, 7).astype(int)
    return q, stored


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

"""Values that are hard to encode, and what it means that two results are equal."""

import jax.numpy as jnp
import numpy as np


def hard(shape, dtype, group: int):
    """Ordinary values; groups that are equal, zero, denormal, huge, or hold inf or NaN; outliers at
    a group's ends; ties; a peak among zeros; ranges that are tiny, infinite, nearly denormal, or
    so wide that eight scales overflow.
    """
    rng = np.random.default_rng(len(shape) + group)
    x = rng.normal(size=shape).astype(np.float32)
    flat = x.reshape(-1)
    info = jnp.finfo(dtype)
    fills = [1.5, 0.0, -0.0, *map(float, (info.smallest_subnormal, info.max, -info.max, info.tiny))]
    with np.errstate(over="ignore"):
        for number, start in enumerate(range(group, flat.size - group + 1, 2 * group)):
            part, which = flat[start : start + group], number % 19
            if which < 7:
                part[:] = fills[which]
            elif which == 7:
                part[[0, -1]] = 50, -70
            elif which in (8, 9, 10, 11):
                part[rng.integers(group)] = (np.inf, -np.inf, np.nan, -np.nan)[which - 8]
            elif which == 12:
                part[:] = rng.integers(-16, 17, group) / 2  # ties, at a scale of one
                part[0] = 8
            elif which == 13:
                part[: group // 2] = float(info.max)
            elif which == 14:
                part[:] = np.linspace(-float(info.max), float(info.max), group)
            elif which == 15:
                part[:], part[rng.integers(group)] = 0, 1
            elif which == 16:
                part[:] = 1000 + rng.integers(-4, 5, group) / 8
            elif which == 17:
                part[:] = np.linspace(-0.874, 0.997, group) * float(info.max)
            else:
                part[:] = np.ldexp(part, rng.integers(-120, -95, group))
                part[np.abs(part) < 2.0**-126] = 0  # what hardware may flush
        return jnp.asarray(x).astype(dtype)


def channel_scales(x, dtype):
    """Scales of the channels; some are 0, NaN, and greater than all values."""
    scales = jnp.abs(jnp.nan_to_num(x.astype(jnp.float32), posinf=1, neginf=1))
    scales = scales.max(tuple(range(x.ndim - 1))) / 8
    return scales.at[:3].set(jnp.array([0, jnp.nan, 1e30], jnp.float32)).astype(dtype)


def equal(kernel, reference) -> bool:
    """Bit for bit, except that one NaN is as good as another."""
    pairs = zip(kernel, reference if isinstance(reference, tuple) else (reference,), strict=True)
    return all(_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def _equal(a, b) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    nan = (a != a) & (b != b)
    return bool((nan | (a.view(f"u{a.itemsize}") == b.view(f"u{b.itemsize}"))).all())

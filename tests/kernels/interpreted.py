"""Run by test_interpreted.py: every kernel, interpreted, beside its reference on hard values; a
line of JSON a case.

python -m tests.shared.worker tests.kernels.interpreted [some]

With `some`, each shape has one dtype.
"""

from tests.kernels import interpreter  # isort: skip  (before any kernel)

import functools
import json

import jax
import jax.numpy as jnp

from jaxmem_kernels import int4
from jaxmem_kernels.gpu import launch
from tests.kernels.values import channel_scales, equal, hard

assert interpreter.call is launch.adapter.call
# The codec's group for each shape.
SHAPES = {(33, 3, 128): 64, (3, 4096): 2048, (67, 48): 16, (5003,): 64, (8191,): 256}
# dtype, the scales' dtype, whether rounding is stochastic, seed
HOW = (
    ("bfloat16", "bfloat16", False, 0),
    ("float32", "float32", True, 2**31 + 5),
    ("float16", "bfloat16", True, 0),
    ("float32", "bfloat16", False, 0),
)
FLAT = (5003,), (8191,)


def report(case: str, kernel, reference) -> None:
    print(json.dumps({"case": case, "equal": equal(kernel, reference)}), flush=True)


def of_groups(run, x, how, back) -> None:
    """Runs each operation of groups: an encoder, and the decoder of its results."""
    run("dequantize", run("quantize", (x,), **how), **back)
    run("dequantize_offset", run("quantize_offset", (x,), **how), **back)


def of_channels(run, x, scales, values, slots, how, back) -> None:
    """Runs each operation of channels. The channels with a slot are stored as `values`."""
    by = {name: value for name, value in how.items() if name != "scale"}
    run("dequantize_by", (*run("quantize_by", (x, scales), **by), scales), **back)
    codes = run("quantize_without", (x, slots < values.shape[-1]), **how)
    run("dequantize_with", (*codes, values, slots), **back)


def both(case: str, op: str, arrays, **params):
    """The reference's results, after the kernel's were reported equal to them or not."""
    wanted = jax.jit(lambda *a: getattr(int4, op)(*a, **params))(*arrays)
    report(f"{op} {case}", getattr(launch, op)(90, *arrays, **params), wanted)
    return wanted if isinstance(wanted, tuple) else (wanted,)


def of_int4(shape: tuple[int, ...], dtype: str, scale: str, stochastic: bool, seed: int) -> None:
    group = SHAPES[shape]
    case = f"{shape} {dtype} {scale}{' stochastic' * stochastic}{f' {seed}' * (seed > 0)}"
    x, width = hard(shape, dtype, group), shape[-1]
    how = {"group": group, "scale": scale, "stochastic": stochastic, "seed": seed}
    back = {"width": width, "dtype": dtype}
    run = functools.partial(both, case)
    of_groups(run, x, how, back)
    if shape in FLAT:
        return
    channels = jnp.array([0, width // 2, width - 1])
    slots = jnp.full(width, 3, jnp.int32).at[channels].set(jnp.arange(3, dtype=jnp.int32))
    # The interpreter flushes bfloat16's denormals.
    values = jnp.where(jnp.abs(x) < jnp.finfo(dtype).tiny, 0, x)[..., channels]
    of_channels(run, x, channel_scales(x, scale), values, slots, how, back)


def traffic(op: str, arrays, **params):
    """Reports bytes that the kernel loads and stores a value of the tensor, and the least: all of
    each operand and result.

    What rows share is left out: a few kilobytes, read from memory once.
    """
    results = getattr(launch, op)(90, *arrays, **params)
    arrays = (*arrays, *results)
    seen = [m for m in interpreter.Counting.arrays if m.array.ndim > 1]
    whole = [a for a in arrays if a.ndim > 1]
    values = max(a.size for a in whole)
    moved = sum(m.touched * a.dtype.itemsize for m, a in zip(seen, whole, strict=True)) / values
    least = sum(a.nbytes for a in whole) / values
    print(json.dumps({"case": f"traffic of {op}", "moved": moved, "least": least}), flush=True)
    return results


def all_traffic() -> None:
    x = jax.random.normal(jax.random.key(0), (32, 1024), jnp.bfloat16)
    how = {"group": 64, "scale": "bfloat16", "stochastic": False}
    back = {"width": 1024, "dtype": "bfloat16"}
    of_groups(traffic, x, how, back)
    scales, slots = jnp.ones(1024, jnp.bfloat16), jnp.full(1024, 8, jnp.int32).at[5].set(0)
    of_channels(traffic, x, scales, x[:, :1], slots, how, back)


def main(which: str = "") -> None:
    all_traffic()
    for number, shape in enumerate(SHAPES):
        how = HOW[: 4 if shape in ((33, 3, 128), (5003,)) else 2]
        for one in [HOW[number % 4]] if which == "some" else how:
            of_int4(shape, *one)

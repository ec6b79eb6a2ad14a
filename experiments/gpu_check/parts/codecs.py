"""Measures the speed of every codec on the device at hand, compared with a copy in the same run and
with XLA's fusion of the reference. Counts values that differ between kernels and references.

A point encodes or decodes tensors with rows of 4096 values. Small tensors are several in one
program, one after another, so that a program's data exceed the cache. The bytes of a codec are the
bytes of the tensor and of its codes, counted once. A second read lowers the rate.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.gpu_check.measure import in_flight, normal
from experiments.gpu_check.settings import Settings
from jaxmem import codecs

EQUAL = "equals its reference: "
SHAPE, TINY = (4096, 4096), (64, 1024)
WIDTH = 4096
SIZES, SMALL = tuple(2**n for n in (24, 28, 20, 16)), (2**14,)
# The least number of values of a program, and the largest number of its tensors. More tensors would
# take longer to compile.
PASS, MOST = 2**28, 24
CODECS: dict[str, Any] = {
    "grouped_symmetric": codecs.GroupedSymmetric(),
    "grouped_symmetric stochastic": codecs.GroupedSymmetric(stochastic=True),
    "grouped_asymmetric": codecs.GroupedAsymmetric(),
    "channelwise_symmetric": codecs.ChannelwiseSymmetric(),
    "outlier_separated": codecs.OutlierSeparated(),
    "bit_mask": codecs.BitMask(),
}
WAYS = ("encode", "decode")


def points(settings: Settings) -> list[str]:
    return [*(EQUAL + name for name in CODECS), *speeds(settings.small)]


def speeds(small: bool = False) -> list[str]:
    """Returns the points of `speed`, each with a codec, a way and a number of values."""
    sizes = SMALL if small else SIZES
    return [f"{name} {way} {size}" for size in sizes for name in CODECS for way in WAYS]


def measure(point: str, settings: Settings, rows: dict[str, dict]) -> dict:
    if not point.startswith(EQUAL):
        return speed(point)
    return equality(point.removeprefix(EQUAL), TINY if settings.small else SHAPE)


def equality(name: str, shape: tuple[int, ...]) -> dict:
    """Counts the codes and the decoded values that differ between the device's kernels and its
    references.
    """
    codec = CODECS[name]
    x = normal(shape, jnp.bfloat16).at[:, 7].multiply(50)
    x = x > 0 if name == "bit_mask" else x

    def both(x):
        codes = codec.encode(x)
        return codes, codec.decode(codes, x.shape, x.dtype)

    kernel = jax.jit(both)(x)
    with codecs.references():
        # A new function, since `both` is already compiled with kernels.
        reference = jax.jit(lambda x: both(x))(x)
    differ = [
        int((a != b).sum()) for a, b in zip(jax.tree.leaves(kernel), jax.tree.leaves(reference))
    ]
    return {"codec": str(codec), "shape": list(shape), "values": x.size, "differ": differ}


def speed(point: str) -> dict:
    """Measures a point: seconds per tensor, GB/s, the rate relative to a copy in the same run, and
    the seconds relative to the reference.
    """
    name, way, size = *point.rsplit(" ", 2)[:2], int(point.rsplit(" ", 1)[1])
    codec, shape = CODECS[name], (size // WIDTH, WIDTH)
    dtype = jnp.dtype(bool if name == "bit_mask" else "bfloat16")
    count = max(1, min(MOST, PASS // size)) if size >= min(SIZES) else 1
    tensors = [_tensor(shape, dtype, seed) for seed in range(count)]
    encode = lambda: _each(codec.encode)
    decode = lambda: _each(lambda codes: codec.decode(codes, shape, dtype))
    codes = encode()(tensors)
    given: Any = tensors if way == "encode" else codes
    program = encode if way == "encode" else decode
    with codecs.references():
        reference = program().lower(given).compile()
    kernel = program().lower(given).compile()
    flip = _each(lambda x: ~x if dtype.kind == "b" else -x).lower(tensors).compile()
    kernels, references, copies = _seconds(
        [lambda: kernel(given), lambda: reference(given), lambda: flip(tensors)], count
    )
    moved = tensors[0].nbytes + sum(c.nbytes for c in codes[0])
    rate, copy = moved / kernels, 2 * tensors[0].nbytes / copies
    return {
        "codec": str(codec),
        "way": way,
        "values": size,
        "dtype": dtype.name,
        "tensors": count,
        "is_kernel": "triton_kernel_call" in (kernel.as_text() or ""),
        "seconds": kernels,
        "reference_seconds": references,
        "copy_seconds": copies,
        "bytes": moved,
        "gigabytes_per_second": rate / 1e9,
        "copy_gigabytes_per_second": copy / 1e9,
        "of_copy": rate / copy,
        "of_reference": kernels / references,
    }


def _tensor(shape, dtype, seed: int):
    values = normal(shape, jnp.float32, seed)
    return values > 0 if dtype.kind == "b" else values.astype(dtype)


def _each(function: Callable):
    """Returns one program that applies `function` to every tensor of a list."""
    return jax.jit(lambda given: [function(one) for one in given])


def _seconds(runs: Sequence[Callable[[], Any]], count: int, rounds: int = 12) -> list[float]:
    """Returns the median seconds per tensor of each run. The runs alternate."""
    taken: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 2):
        for run, times in zip(runs, taken):
            seconds = in_flight(run)
            if number >= 2:  # the first two rounds warm up
                times.append(seconds / count)
    return [statistics.median(times) for times in taken]


def table(rows: Sequence[dict]) -> str:
    """Returns rows of `speed` as a Markdown table."""
    head = ("codec", "way", "values", "GB/s", "of a copy", "time of XLA's", "runs")
    cells = [
        (
            row["codec"].split("(")[0] + " stochastic" * ("stochastic" in row["codec"]),
            row["way"],
            f"2^{row['values'].bit_length() - 1}",
            f"{row['gigabytes_per_second']:.0f}",
            f"{row['of_copy']:.2f}",
            f"{row['of_reference']:.2f}",
            "kernel" if row["is_kernel"] else "reference",
        )
        for row in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ("---",) * len(head), *cells))


def summary(rows: dict[str, dict], settings: Settings) -> dict:
    """Returns the table and, for each codec, the rate relative to a copy at the largest size, and
    the least size at which its kernel is faster than the reference.
    """
    measured = {point: row for point, row in rows.items() if "of_copy" in row}
    by_size = sorted(measured.items(), key=lambda item: item[1]["values"])
    found: dict = {"table": table([row for _, row in by_size]).splitlines()}
    of = lambda name, way: [r for p, r in by_size if p.rpartition(" ")[0] == f"{name} {way}"]
    for name in CODECS:
        for way in WAYS:
            if own := of(name, way):
                pays = [row["values"] for row in own if row["of_reference"] < 1]
                found[f"{name} {way}"] = {
                    "of_copy": own[-1]["of_copy"],
                    "pays_from": min(pays, default=None),
                }
    for name in ("grouped_symmetric stochastic", "outlier_separated"):
        found[f"{name}, times grouped_symmetric's seconds"] = {
            way: [
                a["seconds"] / b["seconds"]
                for a, b in zip(of(name, way), of("grouped_symmetric", way))
            ]
            for way in WAYS
        }
    found["differ"] = {point: sum(row["differ"]) for point, row in rows.items() if "differ" in row}
    return found

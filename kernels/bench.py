"""Speed of every codec on the device at hand, against a copy in the same run and against XLA's own
fusion of the reference.

    python -m kernels.bench [--out FILE] [--small]

Each size is a tensor of rows of 4096 values, or of several of them one after the other in one
program: a round of encoding, its reference and the copy passes through more than a cache. Bytes are
the tensor's and its codes', once: what a codec reads twice lowers its rate. --small: a rehearsal.
"""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import codecs
from jaxmem_kernels import references as only_references

WIDTH = 4096
SIZES = tuple(2**n for n in (20, 22, 24, 26, 28, 30))
SMALL = (2**16,)
PASS, MOST = (
    2**28,
    24,
)  # values of one program at least, in so many tensors at most: their compiling takes time
CODECS: dict[str, Any] = {
    "grouped_symmetric": codecs.GroupedSymmetric(),
    "grouped_symmetric stochastic": codecs.GroupedSymmetric(stochastic=True),
    "grouped_asymmetric": codecs.GroupedAsymmetric(),
    "channelwise_symmetric": codecs.ChannelwiseSymmetric(),
    "outlier_separated": codecs.OutlierSeparated(),
    "bit_mask": codecs.BitMask(),
}
WAYS = ("encode", "decode")


def points(small: bool = False) -> list[str]:
    return [
        f"{name} {way} {size}"
        for name in CODECS
        for size in (SMALL if small else SIZES)
        for way in WAYS
    ]


def measure(point: str) -> dict:
    """Of a point: seconds a tensor, GB/s, shares of a copy's rate in the same run, and times the
    reference's seconds.
    """
    name, way, size = *point.rsplit(" ", 2)[:2], int(point.rsplit(" ", 1)[1])
    codec, shape = CODECS[name], (size // WIDTH, WIDTH)
    dtype = jnp.dtype(bool if name == "bit_mask" else "bfloat16")
    count = max(1, min(MOST, PASS // size)) if size >= SIZES[0] else 1
    tensors = [_tensor(shape, dtype, seed) for seed in range(count)]
    encode = lambda: _each(codec.encode)
    decode = lambda: _each(lambda codes: codec.decode(codes, shape, dtype))
    codes = encode()(tensors)
    given: Any = tensors if way == "encode" else codes
    program = encode if way == "encode" else decode
    with only_references():
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
    values = jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, jnp.float32))
    return values() > 0 if dtype.kind == "b" else values().astype(dtype)


def _each(function: Callable):
    """One program that does it to every tensor of a list."""
    return jax.jit(lambda given: [function(one) for one in given])


def _seconds(runs: Sequence[Callable[[], Any]], count: int, rounds: int = 12) -> list[float]:
    """The median of each run's seconds, a tensor; runs take turns."""
    taken: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 2):
        for run, times in zip(runs, taken):
            start = time.perf_counter()
            jax.block_until_ready(run())
            if number >= 2:  # the first two warm up
                times.append((time.perf_counter() - start) / count)
    return [statistics.median(times) for times in taken]


def table(rows: Sequence[dict]) -> str:
    """Rows as Markdown."""
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m kernels.bench", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="takes the rows as JSON")
    parser.add_argument("--small", action="store_true", help="tiny sizes, such as a CPU's")
    args = parser.parse_args(argv)
    rows = []
    for point in points(args.small):
        rows.append(measure(point))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    device = {
        "device": jax.local_devices()[0].device_kind,
        "jax": jax.__version__,
        "command": "python -m kernels.bench",
    }
    if args.out:
        args.out.write_text(json.dumps(device | {"rows": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()

"""How near is the price of a matrix product in one of Triton's fusions to what XLA's table says?

    python -m benchmarks.product_times

XLA's estimates of products in Triton's fusions mean nothing before they are tuned, so that
`jaxmem._target.hlo.products` prices them by rates. XLA has a table of products that its authors
measured on an H100, which it reads for library calls. Here bfloat16 products of transformers'
shapes are compiled for an H200 as both. `ratio` is the formula's time over the table's.
"""

import statistics

import jax
import jax.numpy as jnp

from benchmarks.shared.results import Report
from benchmarks.shared.steps import compiled
from jaxmem._target.deviceless.compiler import Compiler

TARGET, CAPABILITY = "h200", 90
LIBRARY = {"xla_gpu_enable_triton_gemm": False}
OF_LAYERS = [
    (m, n, k)
    for m in (1024, 4096, 8192, 32768)
    for n, k in (
        (768, 768), (3072, 768), (768, 3072), (2304, 768), (1024, 4096), (4096, 1024),
        (4096, 4096), (16384, 4096),
    )
]  # fmt: skip
OF_GRADIENTS = [(768, 768, 8192), (3072, 768, 8192), (4096, 4096, 8192)]
OF_ATTENTION = [
    (batch, *shape)
    for batch in (24, 96, 512)
    for shape in ((1024, 1024, 64), (1024, 64, 1024), (2048, 2048, 128))
]
ODD = [(m, 50257, 768) for m in (1024, 8192)]  # a vocabulary that no tile divides


def products() -> list[tuple[int, ...]]:
    """(m, n, k), with a batch before it for attention's."""
    return [*OF_LAYERS, *OF_GRADIENTS, *OF_ATTENTION, *ODD]


def ratio(compiler: Compiler, *batch_m_n_k: int) -> dict[str, float]:
    """Seconds of a product by the formula and by the table, which XLA reads for library calls."""
    *batch, m, n, k = batch_m_n_k
    shapes = (*batch, m, k), (*batch, k, n)
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    traced = jax.jit(jnp.matmul).trace(*avals)
    ours, table = (
        compiled(compiler, traced, CAPABILITY, options).xla_seconds for options in (None, LIBRARY)
    )
    assert ours is not None
    assert table is not None
    return {"formula": ours, "table": table, "ratio": ours / table}


def of_ratios(ratios: list[float]) -> dict[str, float]:
    return {
        "products": len(ratios),
        "median": statistics.median(ratios),
        "mean distance from 1": statistics.mean(abs(r - 1) for r in ratios),
        "least": min(ratios),
        "largest": max(ratios),
    }


def summary(report: Report) -> dict:
    of = lambda odd: [r["ratio"] for k, r in report.results.items() if ("50257" in k) == odd]
    return {"shapes that tiles divide": of_ratios(of(False)), "other shapes": of_ratios(of(True))}


def main() -> None:
    with Compiler(TARGET, workers=1) as compiler:
        run = lambda report, *shape: report.once(str(shape), ratio, compiler, *shape)
        Report("product_times").for_each(products(), run, summary)


if __name__ == "__main__":
    main()

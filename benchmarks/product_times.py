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
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._trace.export import export_flat

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


def exported(*batch_m_n_k: int) -> bytes:
    *batch, m, n, k = batch_m_n_k
    shapes = (*batch, m, k), (*batch, k, n)
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return export_flat(jax.jit(jnp.matmul).trace(*avals), "cuda", CAPABILITY)[0]


def summary(report: Report) -> dict:
    found = {}
    for name, chosen in (("shapes that tiles divide", False), ("other shapes", True)):
        ratios = [r["ratio"] for k, r in report.results.items() if ("50257" in k) == chosen]
        found[name] = {
            "products": len(ratios),
            "median": statistics.median(ratios),
            "mean distance from 1": statistics.mean(abs(r - 1) for r in ratios),
            "least": min(ratios),
            "largest": max(ratios),
        }
    return found


def main() -> None:
    report = Report("product_times")
    wanted = [shape for shape in products() if not report.has(str(shape))]
    with Compiler(TARGET) as compiler:
        futures = [
            (shape, compiler.submit(program), compiler.submit(program, options=LIBRARY))
            for shape in wanted
            for program in [exported(*shape)]
        ]
        for shape, fused, library in futures:
            ours, table = fused.result().xla_seconds, library.result().xla_seconds
            assert ours is not None
            assert table is not None
            row = {"formula": ours, "table": table, "ratio": ours / table}
            report.add(str(shape), row)
    report.summarise(summary(report))


if __name__ == "__main__":
    main()

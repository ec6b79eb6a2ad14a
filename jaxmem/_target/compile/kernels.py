"""What the Pallas kernels of a trace compute. Compiled programs tell no more of it than their
authors do (`cost_estimate=` of `pallas_call`).
"""

from collections.abc import Sequence
from typing import Any

from jaxmem._trace.jaxpr import Jaxpr, equations, matmul_flops

Shapes = tuple[tuple[int, ...], ...]


def kernel_flops(jaxpr: Jaxpr) -> list[tuple[Shapes, Shapes, int]]:
    """(shapes of the operands, of the results, FLOPs of the matrix products) of each kernel in a
    program: by these shapes it is found again once it is compiled. Of kernels with equal shapes the
    dearest is returned.
    """
    known: dict[tuple[Shapes, Shapes], int] = {}
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "pallas_call":
            shapes = _shapes(eqn.invars), _shapes(eqn.outvars)
            known[shapes] = max(known.get(shapes, 0), int(matmul_flops(eqn)[0]))
    return [(operands, results, flops) for (operands, results), flops in known.items() if flops]


def _shapes(values: Sequence[Any]) -> Shapes:
    return tuple(tuple(v.aval.shape) for v in values)

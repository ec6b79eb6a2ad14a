"""The FLOPs of Pallas kernels, read from the trace. A compiled module holds a kernel as an opaque
call, which is found again by the shapes of its operands and results.
"""

import re
from collections.abc import Sequence
from typing import Any

from jaxmem._target.hlo.text import Instruction
from jaxmem._trace.jaxpr import Jaxpr, equations, matmul_flops

# What the kernel's author says (`cost_estimate=` of `pallas_call`).
_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)","transcendentals":"(\d+)"')

Shapes = tuple[tuple[int, ...], ...]


def kernel_flops(jaxpr: Jaxpr) -> list[tuple[Shapes, Shapes, int]]:
    """(shapes of the operands, of the results, FLOPs of the matrix products) of each kernel in a
    program: by these shapes it is found again once it is compiled. Of kernels with equal shapes the
    dearest is returned.
    """
    known: dict[tuple[Shapes, Shapes], int] = {}
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "pallas_call":
            shapes = _of_values(eqn.invars), _of_values(eqn.outvars)
            known[shapes] = max(known.get(shapes, 0), int(matmul_flops(eqn)[0]))
    return [(operands, results, flops) for (operands, results), flops in known.items() if flops]


class Kernels:
    """Kernels by the shapes of their operands and results, as the trace knew them.

    traced: (shapes of the operands, of the results, FLOPs) of each.
    """

    def __init__(self, traced: Sequence[Sequence]):
        self._flops = {_shapes(given, made): flops for given, made, flops in traced}

    def computes(self, i: Instruction) -> tuple[int, int]:
        """FLOPs of matrix products, and the number of transcendental operations: by the author's
        estimate, else the products by the trace.
        """
        if said := _ESTIMATE.search(i.text):
            return int(said[1]), int(said[2])
        if '"tpu_custom_call"' not in i.text:
            return 0, 0
        arrays = ([a.shape for a in each] for each in (i.operands, i.results))
        return self._flops.get(_shapes(*arrays), 0), 0


def _of_values(values: Sequence[Any]) -> Shapes:
    """The shapes of a jaxpr's variables."""
    return tuple(tuple(v.aval.shape) for v in values)


def _shapes(*arrays: Sequence[Sequence[int]]) -> tuple:
    """The shapes of operands and results as a key."""
    return tuple(tuple(map(tuple, each)) for each in arrays)

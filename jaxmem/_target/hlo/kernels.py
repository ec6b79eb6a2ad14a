"""What Pallas kernels compute, which a TPU's module does not tell of them."""

import re
from collections.abc import Sequence

from jaxmem._target.hlo.text import Instruction

# What the kernel's author says (`cost_estimate=` of `pallas_call`).
_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)","transcendentals":"(\d+)"')


class Kernels:
    """Kernels by the shapes of their operands and results, as the trace knew them.

    traced: (shapes of the operands, of the results, FLOPs) of each.
    """

    def __init__(self, traced: Sequence[Sequence]):
        self._flops = {_shapes(given, made): flops for given, made, flops in traced}

    def computes(self, i: Instruction) -> tuple[int, int]:
        """FLOPs of matrix products, and how many exponentials and the like: as the author says,
        else what the trace told of products.
        """
        if said := _ESTIMATE.search(i.text):
            return int(said[1]), int(said[2])
        if '"tpu_custom_call"' not in i.text:
            return 0, 0
        arrays = ([a.shape for a in each] for each in (i.operands, i.results))
        return self._flops.get(_shapes(*arrays), 0), 0


def _shapes(*arrays: Sequence[Sequence[int]]) -> tuple:
    return tuple(tuple(map(tuple, each)) for each in arrays)

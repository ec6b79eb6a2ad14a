"""Counts the saved bytes and the matrix products of the blocks of a step traced under a plan."""

import dataclasses
import math

import jax

from jaxmem._cost.blocks.classes import at_once
from jaxmem._cost.blocks.find import find_blocks
from jaxmem._trace.arguments import on_host
from jaxmem._trace.jaxpr import matmul_flops, nbytes
from jaxmem.errors import StepError


@dataclasses.dataclass(frozen=True)
class Audit:
    """Saved bytes and matrix products of all blocks of a step. Bytes are for all layers together,
    as traced, before a mesh divides them.

    Matrix products are counted in the blocks' backward equations only: recomputed products, and
    products of the derivative, which are equal under every plan. Products in inner loops count
    once for each iteration.

    saved_bytes: bytes of residuals in device memory.
    host_bytes: bytes of residuals in host memory.
    matmuls: number of matrix products in a step.
    matmul_flops: FLOPs of these products.
    blocks: number of backward equations.
    """

    saved_bytes: int
    host_bytes: int
    matmuls: int
    matmul_flops: float
    blocks: int


def audit(traced: jax.stages.Traced) -> Audit:
    """Counts residual bytes and matrix products of the blocks' backward equations in
    `jax.jit(step).trace(*args)`.

    A residual is an input of a backward equation that an equation reads, and that is neither a
    cotangent nor always in memory, as parameters are. Raises StepError if no block is
    differentiated.
    """
    instances = find_blocks(traced.jaxpr.jaxpr).instances
    if not instances:
        raise StepError(
            "audit: `traced` has no jax.checkpoint region under a jaxmem policy that a gradient"
            " runs through;"
            " expected at least one: give it a training step"
        )
    device, host, matmuls, flops = [], [], 0, 0.0
    for i in instances:
        # The backward may also return a residual directly, without an equation.
        read = {v for e in i.flat.nodes for v in e.reads} | {
            v for v in i.flat.outputs if isinstance(v, int)
        }
        for v in set(i.charged) & read:
            aval = i.flat.avals[v]
            (host if on_host(aval) else device).append((i, i.layers * nbytes(aval)))
        products = [matmul_flops(e.eqn) for e in i.flat.nodes]
        matmuls += i.runs * sum(n for _, n in products)
        flops += i.runs * math.fsum(f for f, _ in products)
    return Audit(at_once(device), at_once(host), matmuls, flops, len(instances))

"""Counts, in a step that was traced under any plan, what its blocks save and repeat."""

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
    """What the blocks of a whole step hold and repeat. Bytes are those that all layers hold at
    once, as traced: before a mesh divides them.

    Matrix products are those of the blocks' backward equations alone: what they recompute, and the
    derivative's own, which are the same under every plan. Inner loops count times their trip
    counts.

    saved_bytes: residuals in device memory.
    host_bytes: residuals in host memory.
    matmuls: how many matrix products run in a step.
    matmul_flops: their FLOPs.
    blocks: how many backward equations were found.
    """

    saved_bytes: int
    host_bytes: int
    matmuls: int
    matmul_flops: float
    blocks: int


def audit(traced: jax.stages.Traced) -> Audit:
    """Counts residual bytes and matrix products of the blocks' backward equations in
    `jax.jit(step).trace(*args)`.

    A residual is an input of a backward equation that is neither in memory anyhow (parameters) nor
    a cotangent, and that an equation reads. Raises StepError if the step has no block that is
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
        # A residual may also be handed on as an output of the backward, without an equation.
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

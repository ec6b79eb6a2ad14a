"""Counts the saved bytes and the matrix products of the blocks of a step traced under a plan."""

import dataclasses
import math

import jax

from jaxmem._cost.blocks.classes import at_once
from jaxmem._cost.blocks.find import find_blocks
from jaxmem._trace.arguments import on_host
from jaxmem._trace.jaxpr import as_scan, matmul_flops, nbytes, subjaxprs
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


def loop_bytes(jaxpr) -> int:
    """Returns the bytes that loops stack and later reversed loops read. This audit knows no blocks
    and no policies.
    """
    made, read = {}, set()  # by id, since a literal among operands has no hash
    scans = [(eqn, scan) for eqn in jaxpr.eqns if (scan := as_scan(eqn)) is not None]
    for eqn, scan in scans:
        if not eqn.params["reverse"]:
            made |= {id(v): nbytes(v.aval) for v in eqn.outvars[scan.carry :]}
        else:
            used, operands = _used(scan.jaxpr), zip(eqn.invars, scan.jaxpr.invars)
            read |= {id(o) for o, i in operands if id(i) in used}
    return sum(size for v, size in made.items() if v in read)


def _used(jaxpr) -> set[int]:
    """The variables that a jaxpr reads, by id."""
    return {id(v) for e in jaxpr.eqns for v in _read(e)} | {id(v) for v in jaxpr.outvars}


def _read(eqn):
    """The operands that an equation uses. A checkpoint may receive operands that nothing reads."""
    inner = next(subjaxprs(eqn), None)
    if inner is None or len(inner.invars) != len(eqn.invars):
        return eqn.invars
    used = _used(inner)
    return [o for o, i in zip(eqn.invars, inner.invars) if id(i) in used]

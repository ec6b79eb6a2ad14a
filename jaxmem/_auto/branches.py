"""Operations that hold whole programs: branches of a conditional, and calls that say where arrays
lie.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from jaxmem._jax.jaxpr import ClosedJaxpr, body
from jaxmem._jax.rewrite import Node


def branches(node: Node) -> list[ClosedJaxpr]:
    """The programs inside a `cond`, a `shard_map`, or a `jit` with shardings; of any other node
    none.
    """
    params = node.eqn.params
    if node.primitive == "cond":
        return list(params["branches"])
    if node.primitive == "shard_map":
        inner = body(params["jaxpr"])
        return [ClosedJaxpr(inner, ())] if inner is not None else []
    return [params["jaxpr"]] if node.primitive in ("jit", "pjit") else []


def with_branches(node: Node, functions: Sequence[Callable[..., Sequence]]) -> Node:
    """The node with `functions` in the place of its programs, in their order."""
    params = node.eqn.params
    whole = lambda *operands: tuple(functions[0](*operands))
    if node.primitive == "cond":
        # A conditional's first operand is the number of its branch.
        cases = [lambda *operands, f=f: tuple(f(*operands)) for f in functions]
        call = lambda index, *operands: jax.lax.switch(index, cases, *operands)
    elif node.primitive == "shard_map":
        call = jax.shard_map(
            whole,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=frozenset(_manual_axes(params)),
            check_vma=params["check_vma"],
        )
    else:
        call = jax.jit(
            whole,
            in_shardings=tuple(map(_said, params["in_shardings"])),
            out_shardings=tuple(map(_said, params["out_shardings"])),
        )
    return dataclasses.replace(node, call=call)


def _manual_axes(params):
    """The mesh axes of a shard_map, whose name differs between versions of JAX."""
    names = ("newly_manual_axes", "manual_axes")
    return next(params[name] for name in names if name in params)


def _said(sharding):
    """A sharding as `jax.jit` takes it: None where the user said nothing."""
    return None if type(sharding).__name__ == "UnspecifiedValue" else sharding

"""Operations that hold whole programs: branches of a conditional, and calls that say where arrays
lie.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from jaxmem._trace.jaxpr import ClosedJaxpr
from jaxmem._trace.rewrite import Node
from jaxmem._trace.vary import as_mapped


def branches(node: Node) -> list[ClosedJaxpr]:
    """The programs inside a `cond`, a `shard_map`, or a `jit` with shardings; of any other node
    none.
    """
    params = node.eqn.params
    if node.primitive == "cond":
        return list(params["branches"])
    if (mapped := as_mapped(node.eqn)) is not None:
        return [ClosedJaxpr(mapped.jaxpr, ())]
    return [params["jaxpr"]] if node.primitive in ("jit", "pjit") else []


def with_branches(node: Node, functions: Sequence[Callable[..., Sequence]]) -> Node:
    """The node with `functions` in the place of its programs, in their order."""
    params = node.eqn.params
    whole = lambda *operands: tuple(functions[0](*operands))
    if node.primitive == "cond":
        # A conditional's first operand is the number of its branch.
        cases = [lambda *operands, f=f: tuple(f(*operands)) for f in functions]
        call = lambda index, *operands: jax.lax.switch(index, cases, *operands)
    elif (mapped := as_mapped(node.eqn)) is not None:
        call = jax.shard_map(
            whole,
            mesh=mapped.mesh,
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=frozenset(mapped.manual),
            check_vma=params["check_vma"],
        )
    else:
        call = jax.jit(
            whole,
            in_shardings=tuple(map(_said, params["in_shardings"])),
            out_shardings=tuple(map(_said, params["out_shardings"])),
        )
    return dataclasses.replace(node, call=call)


def _said(sharding):
    """A sharding as `jax.jit` takes it: None where the user said nothing."""
    return None if type(sharding).__name__ == "UnspecifiedValue" else sharding

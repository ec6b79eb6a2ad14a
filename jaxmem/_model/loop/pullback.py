"""Makes a pullback wait for its cotangents.

The result of the embedding's pullback waits for the backward of the layers. The gradient of an
embedding begins with zeros. These zeros wait for no other value, so XLA makes them first, and the
peak holds one whole embedding more.

The alternative is an optimization barrier around the pullback. It does not delay the zeros, since
they are no results of the barrier. So the zeros are broadcast from a scalar that comes out of the
barrier.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxmem._trace.jaxpr import Literal
from jaxmem._trace.primitives import REMAT
from jaxmem._trace.rewrite import Node, program_of


def pulled(pull: Callable, cotangents):
    """Returns `pull(cotangents)`. No zeros of the result are made before the cotangents exist.

    A scattered gradient, such as the gradient of an embedding, begins with zeros. These zeros wait
    for no other value: XLA would make them first, and store an embedding's gradient through the
    backward of all layers. Recomputation in `pull` is not changed.
    """
    leaves, structure = jax.tree.flatten(cotangents)
    box = []

    def flat(*leaves):
        made, tree = jax.tree.flatten(pull(jax.tree.unflatten(structure, leaves)))
        box.append(tree)
        return made

    program = program_of(jax.make_jaxpr(flat)(*leaves), lambda eqn: eqn.primitive.name in REMAT)
    if not any(map(_fills, program.nodes)):
        return pull(cotangents)
    nought, *leaves = jax.lax.optimization_barrier((jnp.zeros((), jnp.int32), *leaves))
    nodes = tuple(_after(nought, node) if _fills(node) else node for node in program.nodes)
    made = dataclasses.replace(program, nodes=nodes).run(leaves)
    return jax.tree.unflatten(box[0], made)


def _fills(node: Node) -> bool:
    """Whether the node makes an array of zeros."""
    if node.primitive != "broadcast_in_dim" or node.reads:
        return False
    (value,) = (v.val for v in node.inputs if isinstance(v, Literal))
    if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return False
    number = complex(value)
    return number == 0 and math.copysign(1.0, number.real) > 0


def _after(nought, node: Node) -> Node:
    """Returns a node that broadcasts the zeros from the scalar `nought`, which exists only after
    the cotangents.
    """

    def call(*operands) -> Sequence:
        return node.bind([nought.astype(jnp.result_type(operands[0]))])

    return dataclasses.replace(node, call=call)

"""Finds model states among what a loop carries: they are in memory anyhow, and no block saves
them.
"""

from jaxmem._trace.arguments import on_host
from jaxmem._trace.jaxpr import Scan
from jaxmem._trace.primitives import VIEWS
from jaxmem._trace.rewrite import Node, flatten

UPDATE = "dynamic_update_slice"


def carried_states(loop: Scan) -> set[int]:
    """Positions, among what a loop carries, of stacks of which each turn replaces a layer, such as
    moments, and of what each turn copies from host memory for the next one, such as parameters.
    """
    flat = flatten(loop.jaxpr)
    made = {o: e for e in flat.nodes for o in e.outputs}
    given = flat.inputs[loop.consts : loop.consts + loop.carry]

    def fetched(value) -> bool:
        while (e := made.get(value)) is not None and e.eqn.primitive.name in VIEWS:
            value = e.reads[_position(e, value)]
            if not isinstance(value, int):
                return False
            if on_host(flat.avals[value]):
                return not on_host(e.eqn.outvars[0].aval)
        return False

    def replaced(value, stack: int) -> bool:
        e = made.get(value)
        return e is not None and e.eqn.primitive.name == UPDATE and e.reads[0] == stack

    pairs = [(k, *p) for k, p in enumerate(zip(flat.outputs, given)) if isinstance(p[0], int)]
    return {k for k, value, stack in pairs if replaced(value, stack) or fetched(value)}


def _position(e: Node, value: int) -> int:
    """Which of its operands a view is of: a barrier hands several on."""
    return e.outputs.index(value) if len(e.outputs) > 1 else 0

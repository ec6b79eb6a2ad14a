"""Recognises the equations of a jaxpr that name tensors, and the equations that are blocks."""

from jaxmem._model.tags.combined import parts
from jaxmem._model.tags.policy import Policy
from jaxmem._model.tags.primitive import name_p, tag_p
from jaxmem._trace.jaxpr import Jaxpr, JaxprEqn, equations, inside
from jaxmem._trace.primitives import REMAT


def is_tag(eqn: JaxprEqn) -> bool:
    """Whether the equation names a tensor, by `jaxmem.tag` or by JAX's `checkpoint_name`."""
    return eqn.primitive is tag_p or eqn.primitive is name_p


def holds_tag(eqn: JaxprEqn) -> bool:
    """Whether there is a tag inside the equation, outside inner checkpoints."""
    return any(map(is_tag, inside(eqn, lambda e: e.primitive.name not in REMAT)))


def names_in(eqn: JaxprEqn) -> set[str]:
    """Returns the name of a tag, or the names of the tags inside an equation."""
    return {e.params["name"] for e in (eqn, *inside(eqn)) if is_tag(e)}


def policies_of(eqn: JaxprEqn) -> list[Policy]:
    """Returns the jaxmem policies of a `jax.checkpoint`: its policy, or the parts of a combination
    that are jaxmem policies. The list is empty for any other equation.
    """
    if eqn.primitive.name not in REMAT:
        return []
    return [part for part in parts(eqn.params.get("policy")) if isinstance(part, Policy)]


def is_block(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `jax.checkpoint` with a jaxmem policy."""
    return bool(policies_of(eqn))


def forward_names(jaxpr: Jaxpr) -> set[str]:
    """Returns the names of the tags in `jaxpr` outside the backward of blocks."""
    forward = lambda eqn: not (is_block(eqn) and eqn.params.get("differentiated"))
    return {e.params["name"] for e in equations(jaxpr, forward) if is_tag(e)}

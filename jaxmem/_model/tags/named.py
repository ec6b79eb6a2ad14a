"""Recognises the equations of a jaxpr that name tensors, and the equations that are blocks."""

from jaxmem._model.tags.policy import Policy
from jaxmem._model.tags.tag import name_p, tag_p
from jaxmem._trace.jaxpr import Jaxpr, JaxprEqn, subjaxprs
from jaxmem._trace.primitives import REMAT


def is_tag(eqn: JaxprEqn) -> bool:
    """Whether the equation names a tensor, by `jaxmem.tag` or by JAX's `checkpoint_name`."""
    return eqn.primitive is tag_p or eqn.primitive is name_p


def holds_tag(eqn: JaxprEqn) -> bool:
    """Whether there is a tag inside the equation, outside inner checkpoints."""
    return any(
        is_tag(e) or (e.primitive.name not in REMAT and holds_tag(e))
        for inner in subjaxprs(eqn)
        for e in inner.eqns
    )


def names_in(eqn: JaxprEqn) -> set[str]:
    """Returns the name of a tag, or the names of the tags inside an equation."""
    own = {eqn.params["name"]} if is_tag(eqn) else set()
    return own.union(*(names_in(e) for inner in subjaxprs(eqn) for e in inner.eqns))


def is_block(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `jax.checkpoint` with a `Policy`."""
    return eqn.primitive.name in REMAT and isinstance(eqn.params.get("policy"), Policy)


def forward_names(jaxpr: Jaxpr) -> set[str]:
    """Returns the names of the tags in `jaxpr` outside the backward of blocks."""
    names = {e.params["name"] for e in jaxpr.eqns if is_tag(e)}
    for eqn in jaxpr.eqns:
        if not (is_block(eqn) and eqn.params.get("differentiated")):
            for inner in subjaxprs(eqn):
                names |= forward_names(inner)
    return names

"""`jaxmem.remat_policy`: what a model gives to `jax.checkpoint` to follow a plan."""

from jaxmem._model.tags.groups import groups_of
from jaxmem._model.tags.policy import Policy, check_remat3, decisions, policy_for
from jaxmem.errors import TagError


def remat_policy(plan, *, block: str | None = None, layer: tuple[int, int] | None = None) -> Policy:
    """The policy to give to `jax.checkpoint`, `flax.linen.remat` or `flax.nnx.remat`.

    plan: a `jaxmem.Plan`, a `jaxmem.plans.Assignment`, or None to keep everything. Of complex
      values `jax.checkpoint` saves tagged ones alone, and others are recomputed.
    block: a label, for models with several kinds of blocks whose tags should be decided apart;
      blocks of one label share their decisions. Left out, it is "block".
    layer: (i, L) for layer i, from 0, of L that follow each other in a Python loop. A plan may then
      decide the first layers and the last ones apart. Left out, all layers are decided alike.

    Raises TagError if an argument is none of these, if the plan knows no block of that label, if it
    decides groups of the block's layers apart and `layer` is left out, or if jax_remat3 is on.
    """
    check_remat3()
    block = "block" if block is None else block
    if not isinstance(block, str) or not block:
        raise TagError(f"remat_policy: `block` is {block!r}; expected a non-empty string")
    if layer is None:
        return policy_for(decisions(plan), block)
    if not _is_layer(layer):
        raise TagError(
            f"remat_policy: `layer` is {layer!r}; expected (i, L) for layer i of L layers, such as"
            " (0, 12) for the first of twelve"
        )
    number, layers = layer
    groups = groups_of(plan, block, layers)
    return next(group.policy for group in groups if group.start <= number < group.stop)


def _is_layer(layer) -> bool:
    if not isinstance(layer, tuple) or len(layer) != 2:
        return False
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in layer)
    return whole and 0 <= layer[0] < layer[1]

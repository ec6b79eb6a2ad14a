"""`jaxmem.remat_policy`: makes a policy for `jax.checkpoint` from a plan."""

from jaxmem._model.tags.groups import groups_of
from jaxmem._model.tags.policy import Policy, check_remat3, decisions, policy_for
from jaxmem.errors import TagError


def remat_policy(plan, *, block: str | None = None, layer: tuple[int, int] | None = None) -> Policy:
    """Makes a policy for `jax.checkpoint`, `flax.linen.remat` or `flax.nnx.remat` from a plan.

    plan: a `jaxmem.Plan` or a `jaxmem.plans.Assignment`. None keeps everything. `jax.checkpoint`
      cannot save complex values without a tag, so untagged complex values are recomputed in any
      case.
    block: the label of the block. Blocks with one label share their decisions. Use several labels
      if a plan should decide about several kinds of blocks separately. None means "block".
    layer: (i, L) for layer i, counted from 0, of L layers that a Python loop repeats. A plan may
      then decide about the first and the last layers separately. None means that all layers share
      one decision.

    Raises TagError for an argument of another type, and if the plan has no block of this label.
    Raises TagError also if the plan has separate decisions for groups of layers and `layer` is
    None, and if JAX's option jax_remat3 is on.
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

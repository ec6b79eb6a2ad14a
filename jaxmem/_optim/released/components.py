"""Which parameters, and which arrays of an optax transformation's state, each component of a
released step has: one layer, or one array outside the layers.
"""

import dataclasses

import jax
import optax

from jaxmem._model.states.stacks import Stacks
from jaxmem._optim.released.model import Model
from jaxmem._trace.alone import Alone
from jaxmem.errors import OptimizerError


@dataclasses.dataclass(frozen=True, eq=False)
class Components:
    """Which parameters, and which leaves of a transformation's state, each component has.

    alone: the transformation, traced for a model with one layer.
    outside: a pair for each array outside the layers: its number, and those of what belongs to it
      of the state.
    layer: the same pair, of a layer's arrays.
    """

    alone: Alone
    outside: list[tuple[list[int], list[int]]]
    layer: tuple[list[int], list[int]]

    @staticmethod
    def of(tx: optax.GradientTransformation, model: Model, one) -> "Components":
        """one: the shapes of the parameters, with one layer. Raises OptimizerError where `tx`
        cannot be used for a component at a time.
        """
        if len(jax.tree.leaves(one)) == 1:  # nothing to be coupled with: another one like it tells
            _proved(tx, {"a": one, "b": one})
        alone = _proved(tx, one)
        owned = lambda chosen: [s for s, owner in enumerate(alone.owners) if owner in chosen]
        paths = [path for path, _ in jax.tree.leaves_with_path(one)]
        is_layers = [path[0] == jax.tree_util.DictKey(model.layers) for path in paths]
        layer = [i for i, within in enumerate(is_layers) if within]
        outside = [([i], owned([i])) for i, within in enumerate(is_layers) if not within]
        return Components(alone, outside, (layer, owned(layer)))

    @property
    def stacked(self) -> list[bool]:
        """For each leaf of the state, whether it belongs to the layers, and has an axis of them."""
        return [s in self.layer[1] for s in range(len(self.alone.owners))]

    def leaves(self, state) -> list:
        """The state's leaves; `Stacks` of an array are one."""
        leaves = jax.tree.leaves(state, is_leaf=is_stacks)
        if len(leaves) != len(self.alone.owners):
            raise OptimizerError(
                f"released_step: the optimizer's state has {len(leaves)} arrays, and `tx` makes"
                f" {len(self.alone.owners)}; expected what `init` or `create` made for this `tx`"
            )
        return leaves

    def tree(self, leaves):
        """Undoes `leaves`."""
        return jax.tree.unflatten(self.alone.structure, leaves)


def _proved(tx: optax.GradientTransformation, one) -> Alone:
    """Traces `tx`. Raises OptimizerError unless every array stands alone."""

    def update(gradients, params, state):
        updates, new = tx.update(gradients, state, params)
        as_stored = lambda a, b: a if a.dtype == b.dtype else a.astype(b.dtype)
        return optax.apply_updates(params, updates), jax.tree.map(as_stored, new, state)

    try:
        alone = Alone.of(tx.init, update, one)
    except Exception as error:
        raise OptimizerError(
            "released_step: `tx` cannot be called with a gradient, its state and the parameters:"
            f" {type(error).__name__}: {error}; expected a transformation that fits the parameters'"
            " tree, of which a layer's arrays have no axis of layers, and that needs no `value` or"
            " `value_fn`, which a step that updates in its backward does not have"
        ) from error
    if alone.draws:
        raise OptimizerError(
            "released_step: `tx` draws random numbers, which would be the same in every layer;"
            " expected a transformation that draws none"
        )
    if alone.coupled is not None:
        first, second = (alone.names[i] for i in alone.coupled)
        raise OptimizerError(
            f"released_step: `tx` updates `{first}` and `{second}` by each other's gradients (or"
            " may, in a conditional); expected an update in which every array stands alone, since"
            " each layer's gradient is let go as it appears: clip=('norm', c) is the exact global"
            " norm, jaxmem.adama gathers microbatches, and gradients that are not finite are left"
            " out anyway"
        )
    return alone


def is_stacks(a) -> bool:
    return isinstance(a, Stacks)

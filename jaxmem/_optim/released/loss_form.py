"""The parameters of a loss in the user's own tree, and in the form of a `ReleasedStep`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem._model.states.layout import is_split, joined_shapes
from jaxmem._optim.adama.eight_bits import is_coded
from jaxmem._optim.adama.rule import whole_mask
from jaxmem._optim.adama.transform import AdamA
from jaxmem._optim.released.fold import entries
from jaxmem.errors import OptimizerError

LAYERS, OUTER = "layers", "outer"


class LossForm:
    """The user's tree of parameters, and its form in a `ReleasedStep`: a dict of two lists, without
    frozen parameters. In the trees of trained parameters, None stands for a frozen one.

    shapes: the parameters' shapes, in the user's tree.
    layers: the numbers of the layers' leaves, once the loss is divided.
    """

    def __init__(self, params, accumulates: bool, trainable):
        """Raises OptimizerError unless parameters are arrays, and trained ones floating-point.

        accumulates: whether the optimizer is AdamA, whose moments have the tree of the parameters.
        trainable: the argument of `released_step`.
        """
        leaves, self._structure = jax.tree.flatten(params, is_leaf=is_split)
        for path, a in jax.tree.leaves_with_path(params, is_leaf=is_split):
            if callable(a) or isinstance(a, str):
                raise OptimizerError(
                    f"released_step: `params{jax.tree_util.keystr(path)}` is {type(a).__name__};"
                    " expected a tree of arrays alone: for a module of Equinox,"
                    " eqx.partition(module, eqx.is_array), and a loss that combines both parts"
                )
        self.shapes = jax.tree.unflatten(self._structure, map(_shape, leaves))
        self.layers: tuple[int, ...] = ()
        self._accumulates = accumulates
        self._trained = trained_leaves(trainable, self.shapes)
        for path, a, trained in zip(self.paths, jax.tree.leaves(self.shapes), self._trained):
            if trained and not jnp.issubdtype(a.dtype, jnp.inexact):
                raise OptimizerError(
                    f"released_step: `params{path}` is {a.dtype}; expected floating-point arrays,"
                    " which gradients are folded for, or a `trainable` that leaves this array out"
                )

    @property
    def paths(self) -> list[str]:
        """The paths of the leaves."""
        return [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(self.shapes)]

    @property
    def trains_all(self) -> bool:
        return all(self._trained)

    @property
    def frozen_numbers(self) -> frozenset[int]:
        """The numbers of the leaves that are not trained."""
        return frozenset(i for i, trained in enumerate(self._trained) if not trained)

    def _numbers(self, *, of_layers: bool, trained: bool) -> list[int]:
        """The numbers of leaves, the layers' leaves in the order of `layers`."""
        others = [i for i in range(len(self._trained)) if i not in self.layers]
        return [i for i in (self.layers if of_layers else others) if self._trained[i] == trained]

    def merged(self, trained: Sequence, frozen: Sequence, *, of_layers: bool) -> list:
        """Returns trained and frozen leaves in one list: a layer's, or those outside the layers."""
        found = {
            i: a
            for is_trained, arrays in ((True, trained), (False, frozen))
            for i, a in zip(self._numbers(of_layers=of_layers, trained=is_trained), arrays)
        }
        order = self.layers if of_layers else sorted(found)
        return [found[i] for i in order]

    def inner(self, tree) -> dict[str, Any]:
        """Returns a tree like the trained parameters in the form of a `ReleasedStep`. Raises
        OptimizerError for another tree.
        """
        like = self.trained(self.shapes)
        try:
            leaves = jax.tree.structure(like).flatten_up_to(tree)
        except (TypeError, ValueError):
            leaves = [None]
        if any(a is None for a in leaves):
            is_one = lambda a: is_split(a) or is_coded(a)
            made, want = (
                {jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(t, is_leaf=is_one)}
                for t in (tree, like)
            )
            raise OptimizerError(
                "released_step: the moments in `state[1]` and the trained parameters differ at"
                f" {', '.join(sorted(made ^ want)[:3]) or 'the types of the tree'}; expected the"
                " state that `init` makes for this `trainable`"
            )
        numbers = [i for i, trained in enumerate(self._trained) if trained]
        return self._form(dict(zip(numbers, leaves, strict=True)), trained=True)

    def users(self, inner: dict[str, Any], frozen: dict[str, Any] | None = None) -> Any:
        """The inverse of `inner`; with `frozen` the tree of all parameters."""
        found: dict[int, Any] = {}
        given = [(True, inner[OUTER], inner[LAYERS])]
        given += [] if frozen is None else [(False, frozen[OUTER], frozen[LAYERS])]
        for trained, outer, layers in given:
            numbers = self._numbers(of_layers=True, trained=trained)
            found |= dict(zip(numbers, _apart(layers, len(numbers))))
            found |= dict(zip(self._numbers(of_layers=False, trained=trained), outer))
        return jax.tree.unflatten(self._structure, map(found.get, range(len(self._trained))))

    def frozen(self, params) -> dict[str, Any]:
        """Returns the frozen parameters of the tree of all parameters, in the form of `inner`."""
        leaves = jax.tree.leaves(params, is_leaf=is_split)
        return self._form(dict(enumerate(leaves)), trained=False)

    def _form(self, leaves: Mapping[int, Any], *, trained: bool) -> dict[str, Any]:
        """The leaves of one kind, given by their numbers, in the form of `inner`."""
        outer, layers = (
            [leaves[i] for i in self._numbers(of_layers=of_layers, trained=trained)]
            for of_layers in (False, True)
        )
        return {OUTER: outer, LAYERS: _together(layers)}

    def trained(self, params) -> Any:
        """Returns the tree of all parameters with None in place of frozen ones."""
        leaves = jax.tree.leaves(params, is_leaf=is_split)
        kept = [a if trained else None for a, trained in zip(leaves, self._trained)]
        return jax.tree.unflatten(self._structure, kept)

    def of_users(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """The transformation for the form of a `ReleasedStep`. Its state is of the user's tree."""

        def update(updates: Any, state, params: Any = None) -> tuple[Any, Any]:
            given = None if params is None else self.users(params)
            updates, state = tx.update(self.users(updates), state, given)
            return self.inner(updates), state

        def init(params: Any) -> Any:
            return tx.init(self.users(params))

        return optax.GradientTransformation(init, update)

    def masked(self, tx: AdamA) -> AdamA:
        """Returns `tx` with its mask of weight decay in the form of a `ReleasedStep`."""
        mask = tx.rule.mask_of(self.trained(self.shapes))
        inner = None if mask is None else self.inner(mask)
        return AdamA.of(dataclasses.replace(tx.rule, mask=inner))

    def opened(self, state) -> tuple[Any, Any]:
        """Returns the pair that a `ReleasedStep` receives, from a pair of the user's trees."""
        trained = self.trained(state[0])
        return self.inner(trained), self._moments(state[1], self.inner)

    def closed(self, pair, frozen: dict[str, Any]) -> tuple[Any, Any]:
        """The inverse of `opened` and `frozen`."""
        return self.users(pair[0], frozen), self._moments(pair[1], self.users)

    def _moments(self, state, change: Callable) -> Any:
        """Changes the trees of AdamA's moments. Another optimizer's state is of the user's tree."""
        if not self._accumulates or state is None:
            return state
        return state._replace(**{k: change(v) for k, v in entries(state.moments).items()})


def trained_leaves(trainable, shapes) -> list[bool]:
    """Returns for each leaf of `shapes` whether it is trained.

    trainable: the argument of `released_step`.

    Raises OptimizerError for a mask of another tree, for leaves that are not booleans, and if no
    parameter is trained.
    """
    mask = True if trainable is None else trainable
    is_flag = lambda a: isinstance(a, bool | np.bool_)
    try:
        found = jax.tree.leaves(whole_mask(mask, shapes, lambda function: function(shapes)))
    except (TypeError, ValueError) as error:
        raise OptimizerError(_not_a_mask(f"does not fit `params`: {error}")) from error
    if not all(map(is_flag, found)):
        wrong = next(a for a in found if not is_flag(a))
        raise OptimizerError(_not_a_mask(f"has the leaf {wrong!r}"))
    if not any(found):
        raise OptimizerError(_not_a_mask("trains no parameter"))
    return [*map(bool, found)]


def _not_a_mask(problem: str) -> str:
    return (
        f"released_step: `trainable` {problem}; expected a tree of booleans like `params`, with at"
        " least one True, in which one boolean may stand for a branch, or a function that returns"
        " such a tree for the parameters' shapes: for a filter of Flax NNX,"
        " lambda params: nnx.map_state(nnx.filterlib.to_predicate(filter), params)"
    )


def _together(leaves: Sequence) -> Any:
    """Returns the layers' leaves as one list, or as the `Stacks` of lists of a split state."""
    is_one = lambda a: is_coded(a) or isinstance(a, list)  # `Components.of` doubles a leaf
    return jax.tree.map(lambda *each: [*each], *leaves, is_leaf=is_one) if leaves else []


def _apart(layers, count: int) -> list:
    """The inverse of `_together`: one entry for each of `count` leaves."""
    is_list = lambda a: isinstance(a, list)
    return [jax.tree.map(lambda each, i=i: each[i], layers, is_leaf=is_list) for i in range(count)]


def _shape(a) -> jax.ShapeDtypeStruct:
    """The shape of a leaf; of a leaf in several memories, the shape of one stack."""
    is_one = not is_split(a)
    return jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)) if is_one else joined_shapes(a)

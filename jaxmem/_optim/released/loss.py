"""The released step of a loss as it is: the loop over layers is found in the loss's trace.

Parameters and the optimizer's state keep the user's own tree. The step converts them to the form of
`ReleasedStep`, a dict of two lists of leaves, and back. The conversion renames arrays, and computes
nothing. The alternative is a state in the form of `ReleasedStep`: checkpoints, masks and learning
rates by path would no longer fit the user's tree.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem._core.assignment import INT8, moments_of
from jaxmem._model.auto.divide import DividedLoss, divided_loss
from jaxmem._model.auto.segments import PythonLoops, SegmentedLoss
from jaxmem._model.states import layout
from jaxmem._model.states.layout import is_split, joined_shapes, one_layer, parts_of
from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem._optim.adama.eight_bits import is_coded, quantized
from jaxmem._optim.adama.rule import whole_mask
from jaxmem._optim.adama.transform import AdamA
from jaxmem._optim.released import placement
from jaxmem._optim.released.accumulated import Accumulated, microbatches
from jaxmem._optim.released.direct import Direct
from jaxmem._optim.released.fold import Clip, entries
from jaxmem._optim.released.form import check_is_pair, check_split, check_untraced
from jaxmem._optim.released.model import Model
from jaxmem._optim.released.segments import SegmentedStep
from jaxmem._optim.released.step import ReleasedStep, Within
from jaxmem.errors import OptimizerError

LAYERS, OUTER = "layers", "outer"


@dataclasses.dataclass(frozen=True, eq=False)
class LossStep:
    """A training step of a loss that releases gradients: `step(state, batch, key=None)`.

    `jaxmem.released_step(tx, loss)` makes it. `state` is the pair of the parameters and the
    optimizer's state, each in the user's own tree, and `metrics` is as `ReleasedStep` documents it.
    With `has_aux`, `metrics["aux"]` is the tree that the loss returns after the loss itself; for
    AdamA, its arrays have a leading axis of microbatches. If the step receives a key, the loss is
    called as `loss(params, microbatch, key)`. Microbatch i receives entry i of
    `jax.random.split(key, accumulation_steps)`.

    tx: the optimizer.
    loss: the loss, `loss(params, microbatch)`, a mean.
    plan, label: as for `released_step`.
    clip: how gradients are clipped.
    has_aux: whether the loss returns a pair of the loss and a tree of arrays.
    trainable: which parameters are trained, as for `released_step`; None trains all of them.
    """

    tx: optax.GradientTransformation
    loss: Callable
    plan: Any
    label: str
    clip: Clip
    has_aux: bool = False
    trainable: Any = None

    def init(self, params, batch, key=None) -> tuple[Any, Any]:
        """Makes the first state: the pair of `params` and the optimizer's state.

        params: the parameters: any tree of arrays. Trained parameters are floating-point arrays in
          device memory.
        batch: a batch, or its shapes. With it, the loop over layers is found.
        key: the random key, if the loss takes one.

        Raises OptimizerError for other parameters, and NoLayersError if the loss has no loop over
        layers.
        """
        bound = self.of(params, batch, key)
        state = params, None
        return bound.put(state, bound.released.init(bound.get(state)[0]))

    def with_plan(self, plan) -> "LossStep":
        """Returns the step under another plan."""
        return dataclasses.replace(self, plan=plan, tx=stored_under(plan, self.tx))

    def __call__(self, state, batch, key=None):
        check_is_pair(state)
        return self.of(state[0], batch, key)(state, batch, key)

    def of(self, params, batch, key=None) -> Within:
        """Returns the step for arguments of these shapes. The methods `split` and `joined` of the
        result place the states of the layers, as the same methods of `ReleasedStep` do.

        params, batch, key: arrays or shapes. `params` may be of a split state.

        Raises the errors of `init`.
        """
        form = _Form(params, isinstance(self.tx, AdamA), self.trainable)
        count, one = 1, batch
        if isinstance(self.tx, AdamA):
            count = self.tx.rule.accumulation_steps
            # One microbatch, without the leading axis of microbatches.
            one = one_layer(jax.eval_shape(lambda batch: microbatches(batch, count), batch))
        rest = one, *(() if key is None else (key,))
        leaves = lambda given: jax.tree.leaves((given[0], *(k[0] for k in given[1:])))
        keys_of = lambda key: () if key is None else (jax.random.split(key, count),)
        divided, of_aux = self._divided(form, rest)

        def named(state, metrics):
            """Arranges the auxiliary values as the loss does, if it has any."""
            aux = {"aux": jax.tree.unflatten(of_aux, metrics["aux"])} if self.has_aux else {}
            return state, {k: v for k, v in metrics.items() if k != "aux"} | aux

        if isinstance(divided, SegmentedLoss):
            segments = SegmentedStep(
                self.tx, self.clip, divided, form.shapes, form.trained(form.shapes), leaves
            )
            run = lambda state, batch, key=None: named(*segments(state, (batch, *keys_of(key))))
            return Within(segments, run, lambda pair: pair, lambda _, pair: pair)
        form.layers = divided.layers
        tx: Any = self.tx
        is_adama = isinstance(tx, AdamA)
        optimizer = Accumulated(form.masked(tx)) if is_adama else Direct(form.of_users(tx), None)

        def released(frozen: dict[str, Any]) -> ReleasedStep:
            outer_of = lambda outer: form.merged(outer[OUTER], frozen[OUTER], of_layers=False)
            block = lambda layer, x, *shared: divided.block(
                form.merged(*layer, of_layers=True), x, *shared
            )
            model = Model(
                lambda outer, given: divided.embed(outer_of(outer), leaves(given)),
                divided.block if form.trains_all else block,
                lambda outer, x, stacked, given: divided.head(
                    outer_of(outer), x, stacked, leaves(given)
                ),
                LAYERS,
                self.plan,
                self.label,
                None,
                True,
                True,
                None if form.trains_all else parts_of(frozen[LAYERS]),
            )
            return ReleasedStep(optimizer, model, self.clip)

        def step(state, batch, key=None):
            pair, frozen = form.opened(state), form.frozen(state[0])
            if jax.tree.leaves(frozen[LAYERS]):
                check_split({"params": pair[0][LAYERS], "the frozen params": frozen[LAYERS]})
            else:
                none = layout.like(pair[0][LAYERS], [[] for _ in parts_of(pair[0][LAYERS])])
                frozen = frozen | {LAYERS: none}
            pair, metrics = released(frozen)(pair, (batch, *keys_of(key)))
            return named(form.closed(pair, frozen), metrics)

        def placed(state, where: dict | None):
            pair, frozen = form.opened(state), form.frozen(state[0])
            if not jax.tree.leaves(frozen[LAYERS]):
                return state
            check_untraced("split" if where else "joined", "state", state)
            kept = layout.sharing(state)
            if where is None:
                layers = layout.joined(frozen[LAYERS], kept)
            else:
                defaults = {"copies": 0, "buffers": 0, "outer_moments": layout.DEVICE}
                places = placement.places_of(bare.model.count(pair[0]), **(defaults | where))
                stacks = optimizer.opened(bare.model, *pair)[0]
                states = layout.masters_of(pair[0][LAYERS]), stacks, frozen[LAYERS]
                placement.check_host(states, places)
                layers = layout.split(frozen[LAYERS], places, kept, copied=layout.DEVICE)
            return form.closed(pair, frozen | {LAYERS: layers})

        bare = released(form.frozen(form.shapes))
        put = lambda state, pair: form.closed(pair, form.frozen(state[0]))
        return Within(bare, step, form.opened, put, placed)

    def _divided(self, form: "_Form", rest: tuple) -> tuple[DividedLoss | SegmentedLoss, Any]:
        """Divides the trace of the loss for parameters of `form`, at the layers with most FLOPs:
        the iterations of a scan, or the layers of Python loops. Returns the divided loss, and the
        structure of the auxiliary values.
        """
        with todays_checkpoint():
            closed, out = jax.make_jaxpr(self.loss, return_shape=True)(form.shapes, *rest)
        is_pair = isinstance(out, tuple) and len(out) == 2
        loss, aux = out if self.has_aux and is_pair else (out, None)
        alone = jax.tree.structure(loss) == jax.tree.structure(0) and (is_pair or not self.has_aux)
        first = closed.out_avals[0] if alone else None
        if first is None or first.shape or not jnp.issubdtype(first.dtype, jnp.floating):
            got = ", ".join(a.str_short() for a in closed.out_avals)
            raise OptimizerError(
                f"released_step: `loss` returned {got}; expected the microbatch's mean loss, a"
                " floating-point scalar"
                + (", and a tree of arrays" if self.has_aux else "; or has_aux=True for a pair")
            )
        planned = self.plan is not None
        loops = PythonLoops.of(closed, len(form.paths), planned, form.frozen_numbers)
        if loops is not None and loops.work > loops.scanned:
            return loops.segmented(self.plan, self.label), jax.tree.structure(aux)
        label = self.label if planned else None
        divided = divided_loss(closed, form.paths, label, form.frozen_numbers)
        return divided, jax.tree.structure(aux)


class _Form:
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
        found = dict(zip(numbers, leaves, strict=True))
        outer, layers = (
            [found[i] for i in self._numbers(of_layers=of_layers, trained=True)]
            for of_layers in (False, True)
        )
        return {OUTER: outer, LAYERS: _together(layers)}

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
        outer, layers = (
            [leaves[i] for i in self._numbers(of_layers=of_layers, trained=False)]
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


def stored_under(plan, tx) -> Any:
    """Returns the optimizer with its moments as the plan stores them."""
    if moments_of(plan) != INT8:
        return tx
    return tx.quantized() if isinstance(tx, AdamA) else quantized(tx)


def bound(made, args: tuple) -> Any:
    """Returns the result of a `build` for the step's arguments: a `LossStep` needs their shapes."""
    if not isinstance(made, LossStep) or not args:
        return made
    check_is_pair(args[0])
    return made.of(args[0][0], *args[1:])


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

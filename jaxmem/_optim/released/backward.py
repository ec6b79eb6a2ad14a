"""One microbatch of a released step: the forward and the backward of embed, layers and head. Each
gradient is used as soon as it is complete: it is folded into its moments, or updates its
parameters.

The layers' loop returns its tallies, and does not carry them. XLA computed the index at which a
carried tally was stored together with the tally, which needs the gradient. The fetch of moments by
that index then waited for the gradient too. None of the bytes that the backward fetches were copied
at the same time as a product; now all of them are (`tests/released/test_streamed_deviceless.py`).

Exact clipping by the global norm is of one microbatch, by a second backward over the same saved
tensors. The alternative is the norm of a minibatch, which would need the minibatch's gradient.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._core.lists import merged, separated
from jaxmem._model.loop.arguments import is_floating
from jaxmem._model.loop.loops import fetched_first
from jaxmem._model.loop.pullback import pulled
from jaxmem._model.loop.stack import folded_at, loops_over
from jaxmem._model.states.layout import Copied, length, masters_of, one_layer, read_of
from jaxmem._model.states.store import brought, fetch, returned, streams
from jaxmem._optim.released.fold import TALLIES, Fold, squared
from jaxmem._optim.released.model import Model
from jaxmem._trace.rewrite import depending, reads
from jaxmem._trace.vary import zeros
from jaxmem.errors import OptimizerError


def backward(
    model: Model,
    folds: Sequence[Fold],
    params,
    states,
    batch,
    key,
    whole: Callable = lambda layer: layer,
    held: list[list] | None = None,
):
    """Runs one microbatch, and uses each gradient when it appears. Returns (states, loss, held).
    If the head reports values, `loss` is the pair of the loss and these values.

    model: embed, block and head.
    folds: the fold of each array outside the layers, in the order of the leaves, and then the fold
      of every layer.
    params: the whole parameters, a dict.
    states: the states of the components: a list with a state for each array outside the layers, in
      the order of the leaves, and a list with a state for each stack of layers. If the states of
      stacks have an entry "params", parameters are read from the entry, and replaced.
    batch: the microbatch.
    key: the random key of the microbatch, or None.
    whole: gathers a layer's parameters if `params` has a device's part of them.
    held: the prefetched arrays of each stack's first layer, as the previous microbatch returned
      them; None for the first microbatch.
    """
    # Forward: embed, the loop over layers, head. Each is differentiated separately, so that its
    # gradients appear when the folds need them.
    *outer_folds, layer_fold = folds
    outer, layers = model.outer(params), params[model.layers]
    stacks = model.with_frozen(read_of(layers))
    outer_states, layer_states = states
    embed, combine = _embedding(model, outer, batch, key, sum(map(length, stacks)))
    (x, floats), pull_embed, others = jax.vjp(embed, outer, has_aux=True)
    loops, split, common = loops_over(
        model.block,
        layers,
        x,
        combine(floats, others),
        model.plan,
        model.label,
        key,
        model.dtype,
        model.has_aux,
        whole
        if model.frozen is None
        else lambda layer: (whole(layer[0]), model.whole_frozen(layer[1])),
        layer_states,
        model.frozen,
    )
    first = fetched_first(stacks) if held is None else held
    y, aux, saved, fetched = loops.forward(stacks, key, x, common, first)
    loss, pull_head, reported = jax.vjp(
        lambda outer, y, aux: _loss(model, outer, y, aux, batch), outer, y, aux, has_aux=True
    )
    d_outer, d_y, d_aux = pull_head(jnp.ones_like(loss))
    # No gradient needs the loss itself. Without the barrier, XLA may compute the loss after an
    # in-place update of its operands, and store a copy of them through the layers' backward.
    loss = (loss, reported) if model.reports else loss
    loss, d_y = jax.lax.optimization_barrier((loss, d_y))
    d_outer = jax.tree.leaves(d_outer)  # the head's share of the gradients outside the layers

    # Runs the layers backward. `into` puts each layer's gradient into the state of its stack.
    def back(states, into, parameters):
        # A gradient takes the dtypes of the master, which is updated, and not of a copy.
        like = one_layer(model.with_frozen(masters_of(layers))[0])
        trained = model.trained
        as_tree = lambda k, state, i, g, own: into(
            k, state, i, trained(split.whole(like, g)), trained(own)
        )
        cotangents = d_y, d_aux, zeros(common[0])
        return loops.backward(parameters, key, saved, fetched, cotangents, states, as_tree)

    def back_into_states(fold):
        # The loop returns tallies, and does not carry them: XLA would compute the index at which a
        # tally is stored together with the tally, and the fetch of moments by that index would wait
        # for the tally.
        carried = [{k: v for k, v in s.items() if k not in TALLIES} for s in layer_states]
        tallies = [{k: s[k] for k in TALLIES} for s in layer_states]
        none = jax.tree.map(lambda a: jnp.zeros((), a.dtype), tallies[0])

        def into(k, state, i, gradient, own):
            rest = {k: v for k, v in state.items() if k != "params"}
            is_copied = isinstance(part := state.get("params"), Copied)
            # The loop has read these parameters already, except the master of a copy.
            own = fetch(part.master, i) if is_copied else own
            given = none | ({"params": own} if "params" in state else {})
            use = lambda s, g: fold(s | given, g)
            new = folded_at(use, rest, i, gradient)
            new |= {"params": Copied(new["params"], new["params"])} if is_copied else {}
            return {k: new[k] for k in state}, {k: new[k] for k in none}

        # Replaced parameters are read from the loop's carry: from outside the loop, they would be
        # stored twice.
        def read(k, state):
            if "params" not in state:
                return stacks[k]
            of_carry = read_of(state["params"])[0]
            return of_carry if model.frozen is None else (of_carry, model.frozen[k])

        d_x, d_common, new, told, held = back(carried, into, read)
        counted = jax.tree.map(jnp.add, tallies, told)
        return d_x, d_common, [state | tally for state, tally in zip(new, counted)], held

    # The gradients outside the layers: the sum of embed's and head's gradients. `d_common` begins
    # with the cotangents of the arrays that embed returns for all layers. The other cotangents, of
    # arrays that `block` closes over, are not used: these arrays are no parameters.
    def whole_gradients(d_x, d_common):
        (d_embed,) = pulled(pull_embed, (d_x, d_common[: len(floats)]))
        return [a + b for a, b in zip(d_outer, jax.tree.leaves(d_embed))]

    if layer_fold.clip.how == "norm":
        factor, gradients = _global_factor(folds, states, stacks, back, whole_gradients)
        *outer_folds, layer_fold = (dataclasses.replace(fold, factor=factor) for fold in folds)
        _, _, layer_states, held = back_into_states(layer_fold)
        used = [_used(fold, s, g) for fold, s, g in zip(outer_folds, outer_states, gradients)]
        return (used, layer_states), loss, held

    # The gradient of an array that embed does not read is complete now: it is used and freed before
    # the layers' backward. The gradients of arrays that embed reads, such as tied embeddings, wait
    # for the end, since the halves of a gradient cannot be squared separately.
    again = reads(jax.make_jaxpr(lambda outer: embed(outer)[0])(outer))
    components = list(zip(outer_folds, outer_states, strict=True))
    early = [
        None if is_read else _used(fold, s, g)
        for (fold, s), g, is_read in zip(components, d_outer, again)
    ]
    # The barrier makes the loop wait for these folds. Otherwise their gradients might remain in
    # memory through the loop.
    d_y, early = jax.lax.optimization_barrier((d_y, early))
    d_x, d_common, layer_states, held = back_into_states(layer_fold)
    late = zip(early, components, whole_gradients(d_x, d_common))
    used = [_used(fold, s, g) if done is None else done for done, (fold, s), g in late]
    return (used, layer_states), loss, held


def _used(fold: Fold, state, gradient):
    """Returns `fold(state, gradient)` of an array outside the layers. A state in host memory is
    copied to the device after the gradient exists, so that it is not on the device during the
    backward.
    """
    if not streams(state):
        return fold(state, gradient)
    state_then, gradient = jax.lax.optimization_barrier((state, gradient))
    return returned(fold(brought(state_then), gradient), state)


def _embedding(model: Model, outer, batch, key, layers: int):
    """Separates the differentiated results of the model's `embed` from its other results.

    Returns `embed(outer) -> (x, floats), others` and `combine(floats, others)`, which returns the
    arrays that all layers share as one tuple. `outer` are the trained parameters outside the
    layers, and `layers` is the number of layers.
    """
    # the structure of the shared values, and which leaves are floating-point; known after one run
    box: dict[str, Any] = {}

    # The layers' keys are folded in at 0 to layers - 1, so embed takes the number after these.
    def embed(outer):
        out = model.embed(
            outer, batch, **({} if key is None else {"key": jax.random.fold_in(key, layers)})
        )
        x, *shared = out if isinstance(out, tuple) else (out,)
        leaves, box["tree"] = jax.tree.flatten(tuple(shared))
        box["which"] = box.get("which", tuple(map(is_floating, leaves)))
        floats, others = separated(leaves, box["which"])
        return (x, floats), others

    if model.frozen is not None:
        # A floating-point array that depends on frozen parameters alone has no gradient.
        depends = iter(depending(jax.make_jaxpr(lambda outer: embed(outer)[0][1])(outer)))
        box["which"] = tuple(is_float and next(depends) for is_float in box["which"])

    return embed, lambda *pair: jax.tree.unflatten(box["tree"], merged(pair, box["which"]))


def _loss(model: Model, outer, y, aux, batch):
    """Returns the loss of `head`, and the values that it reports. Raises OptimizerError unless the
    loss is a floating-point scalar.
    """
    loss = model.head(outer, y, *((aux,) if model.has_aux else ()), batch)
    loss, reported = loss if model.reports else (loss, ())
    if jnp.shape(loss) or not is_floating(loss):
        raise OptimizerError(
            f"released_step: `head` returned {jax.typeof(loss).str_short()}; expected the"
            " microbatch's mean loss, a floating-point scalar"
        )
    return loss, reported


def _global_factor(folds: Sequence[Fold], states, stacks, back, whole_gradients: Callable):
    """Runs a backward that keeps only each layer's squared norm, and returns the factor that clips
    the microbatch's gradient by its global norm, and the gradients outside the layers.
    """
    *outer_folds, layer_fold = folds
    outer_states, layer_states = states
    axis = layer_fold.mean_over
    first = {k: masters_of(v)[0] for k, v in layer_states[0].items()}
    like = one_layer(layer_fold.use.like(first))

    def into(k, state, i, gradient, own):
        (gradient,) = jax.lax.optimization_barrier((gradient,))
        return (), squared(gradient, like, axis)

    d_x, d_common, _, squares, _ = back([()] * len(layer_states), into, lambda k, _: stacks[k])
    gradients = whole_gradients(d_x, d_common)
    components = zip(outer_folds, outer_states, gradients)
    outside = [squared(g, fold.use.like(s), axis) for fold, s, g in components]
    # A component whose norm is not finite counts as 0, as the fold will not use its gradient.
    finite = lambda a: jnp.where(jnp.isfinite(a), a, jnp.zeros((), a.dtype))
    within = sum((finite(s).sum() for s in squares[1:]), finite(squares[0]).sum())
    return layer_fold.clip.factor(sum(map(finite, outside), within)), gradients

"""One microbatch of a released step: forward through embed, layers and head, and back again, where
every gradient is folded into its moments as soon as it is whole.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._adama.fold import Fold, squared
from jaxmem._adama.model import Model
from jaxmem._jax.jaxpr import reads
from jaxmem._jax.vary import zeros
from jaxmem._stack.arguments import is_floating, merged, separated
from jaxmem._stack.loops import fetched_first
from jaxmem._stack.stack import folded_at, loops_over
from jaxmem._states.stacks import Copied, length, masters_of, parts_of, read_of
from jaxmem._states.store import brought, fetch, returned, streams
from jaxmem.errors import OptimizerError


def backward(
    model: Model,
    fold: Fold,
    params,
    moments,
    batch,
    key,
    update: Callable | None = None,
    whole: Callable = lambda layer: layer,
    held: list[list] | None = None,
):
    """Returns (moments, loss, held) after one microbatch, whose gradients are folded as they
    appear.

    model: embed, block and head.
    fold: what becomes of one component's gradient; a component is a layer, or an array outside.
    params: the whole parameters, a dict.
    moments: what `Model.started` made: a list for the arrays outside the layers, in the order of
      their leaves, and a list of the layers' own, an entry for each of their stacks.
    batch: the microbatch.
    key: its random key, or None.
    update: `update(parameters, moments)` makes a layer's new parameters, as soon as its moments are
      folded. With it, the layers' moments that are returned have an entry "params" beside them, a
      stack of parameters. None leaves the parameters as they are.
    whole: gathers a layer's parameters where `params` has a device's part of them.
    held: what the microbatch before has fetched of the first layers; None before the first one.
      What is returned is meant for the next one.
    """
    # Forward: embed, the loop over layers, head. The three are differentiated apart, so that each
    # gives its gradients when the fold wants them.
    outer, layers = model.outer(params), params[model.layers]
    stacks = read_of(layers)
    outer_moments, layer_moments = moments
    embed, combine = _embedding(model, batch, key, sum(map(length, stacks)))
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
        whole,
    )
    first = fetched_first(stacks) if held is None else held
    y, aux, saved, fetched = loops.forward(stacks, key, x, common, first)
    loss, pull_head = jax.vjp(
        lambda outer, y, aux: _loss(model, outer, y, aux, batch), outer, y, aux
    )
    d_outer, d_y, d_aux = pull_head(jnp.ones_like(loss))
    d_outer = jax.tree.leaves(d_outer)  # the head's share of the gradients outside the layers

    # Runs the layers backward: into the states, one for each stack, goes what `into` makes of each
    # layer's gradient.
    def back(states, into, parameters=lambda k, _: stacks[k]):
        masters = masters_of(layers)[0]  # whose dtypes a gradient takes
        as_tree = lambda _, state, i, g, own: into(state, i, split.whole(masters, g), own)
        cotangents = d_y, d_aux, zeros(common[0])
        return loops.backward(parameters, key, saved, fetched, cotangents, states, as_tree)

    def back_into_moments(fold):
        # Tallies are told, and not carried: an index that a tally is put at would be computed
        # together with the tally, and the fetch of moments by that index would wait for it.
        carried = [{k: m[k] for k in ("mu", "nu")} for m in layer_moments]
        tallies = [{k: m[k] for k in ("squares", "skipped")} for m in layer_moments]
        none = jax.tree.map(lambda a: jnp.zeros((), a.dtype), tallies[0])

        def folded(state, i, gradient):
            new = folded_at(lambda m, g: fold(m | none, g), state, i, gradient)
            return {k: new[k] for k in ("mu", "nu")}, {k: new[k] for k in none}

        if update is None:
            found = back(carried, lambda m, i, g, _: folded(m, i, g))
        else:
            # What is replaced is read from the loop's carry: from outside, it would be held twice.
            def into(state, i, gradient, own, update=update):
                moments = {k: state[k] for k in ("mu", "nu")}
                # Read before the fold, which waits for the gradient.
                master = fetch(state["params"].master, i) if _is_copied(state) else own
                new, tells = folded(moments, i, gradient)
                updated = update(master, new)
                both = Copied(updated, updated) if _is_copied(state) else updated
                return new | {"params": both}, tells

            read = lambda _, state: state["params"].copy if _is_copied(state) else state["params"]
            with_params = [m | {"params": part} for m, part in zip(carried, parts_of(layers))]
            found = back(with_params, into, read)
        d_x, d_common, states, told, held = found
        counted = jax.tree.map(jnp.add, tallies, told)
        return d_x, d_common, [state | tally for state, tally in zip(states, counted)], held

    # The gradients outside the layers, those of embed added to those of head. `d_common` begins
    # with what embed made for all layers; after it comes what `block` closes over, which is no
    # parameter.
    def whole_gradients(d_x, d_common):
        (d_embed,) = pull_embed((d_x, d_common[: len(floats)]))
        return [a + b for a, b in zip(d_outer, jax.tree.leaves(d_embed))]

    if fold.clip.how == "norm":
        factor, gradients = _global_factor(fold, moments, back, whole_gradients)
        fold = dataclasses.replace(fold, factor=factor)
        _, _, layer_moments, held = back_into_moments(fold)
        outer_moments = [_folded(fold, s, g) for s, g in zip(outer_moments, gradients)]
        return (outer_moments, layer_moments), loss, held

    # An array that embed does not read has its whole gradient now: it is folded before the layers'
    # backward, and let go. What embed reads, tied embeddings too, waits for the end, since halves
    # of a gradient cannot be squared apart.
    again = reads(jax.make_jaxpr(lambda outer: embed(outer)[0])(outer))
    early = [
        None if is_read else _folded(fold, s, g)
        for s, g, is_read in zip(outer_moments, d_outer, again)
    ]
    # The barrier makes the loop wait for these folds; else their gradients might live through it.
    d_y, early = jax.lax.optimization_barrier((d_y, early))
    d_x, d_common, layer_moments, held = back_into_moments(fold)
    late = zip(early, outer_moments, whole_gradients(d_x, d_common))
    outer_moments = [_folded(fold, s, g) if done is None else done for done, s, g in late]
    return (outer_moments, layer_moments), loss, held


def _folded(fold: Fold, state, gradient):
    """`fold(state, gradient)` of an array outside the layers, whose moments may lie in host memory.
    They are brought once the gradient is there, so that they are not held through the backward.
    """
    if not streams(state):
        return fold(state, gradient)
    moments, gradient = jax.lax.optimization_barrier((state, gradient))
    return returned(fold(brought(moments), gradient), state)


def _is_copied(state) -> bool:
    return isinstance(state["params"], Copied)


def _embedding(model: Model, batch, key, layers: int):
    """Splits what the model's `embed` returns into what is differentiated and what is not.

    Returns `embed(outer) -> (x, floats), others` and `combine(floats, others)`, which puts what all
    layers share back into one tuple. `layers`: how many there are.
    """
    # the structure of what is shared and which leaves are floating-point, known after the first run
    box: dict[str, Any] = {}

    # The layers' keys are folded in at 0 to layers - 1, so embed takes the number after these.
    def embed(outer):
        out = model.embed(
            outer, batch, **({} if key is None else {"key": jax.random.fold_in(key, layers)})
        )
        x, *shared = out if isinstance(out, tuple) else (out,)
        leaves, box["tree"] = jax.tree.flatten(tuple(shared))
        box["which"] = tuple(map(is_floating, leaves))
        floats, others = separated(leaves, box["which"])
        return (x, floats), others

    return embed, lambda *pair: jax.tree.unflatten(box["tree"], merged(pair, box["which"]))


def _loss(model: Model, outer, y, aux, batch):
    """What `head` returns. Raises OptimizerError unless it is a floating-point scalar."""
    loss = model.head(outer, y, *((aux,) if model.has_aux else ()), batch)
    if jnp.shape(loss) or not is_floating(loss):
        raise OptimizerError(
            f"released_step: `head` returned {jax.typeof(loss).str_short()}; expected the"
            " microbatch's mean loss, a"
            " floating-point scalar"
        )
    return loss


def _global_factor(fold: Fold, moments, back: Callable, whole_gradients: Callable):
    """Runs a backward that keeps only each layer's squared norm, and returns the factor that clips
    the microbatch's gradient by its global norm, and the gradients outside the layers.
    """
    outer_moments, layer_moments = moments
    axis = fold.mean_over
    like = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), layer_moments[0]["mu"]
    )

    def into(state, i, gradient, _):
        (gradient,) = jax.lax.optimization_barrier((gradient,))
        return (), squared(gradient, like, axis)

    d_x, d_common, _, squares, _ = back([()] * len(layer_moments), into)
    gradients = whole_gradients(d_x, d_common)
    outside = [squared(g, s["mu"], axis) for g, s in zip(gradients, outer_moments)]
    # A component whose norm is not finite counts as none, as the fold will leave it out.
    finite = lambda a: jnp.where(jnp.isfinite(a), a, jnp.zeros((), a.dtype))
    within = sum((finite(s).sum() for s in squares[1:]), finite(squares[0]).sum())
    return fold.clip.factor(sum(map(finite, outside), within)), gradients

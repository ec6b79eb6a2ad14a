"""One microbatch of a released step: forward through embed, layers and head, and back with every
gradient folded.
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
from jaxmem._stack.stack import loops_over
from jaxmem._states.stacked import folded_at
from jaxmem.errors import OptimizerError


def backward(model: Model, fold: Fold, params, moments, batch, key):
    """(moments, loss) after one microbatch, whose gradients are folded as they appear and never
    returned.
    """
    outer, stacked = model.outer(params), params[model.layers]
    outer_moments, layer_moments = moments
    embed, combine = _embedding(model, batch, key, jax.tree.leaves(stacked)[0].shape[0])
    (x, floats), pull_embed, others = jax.vjp(embed, outer, has_aux=True)
    loops, split, common = loops_over(
        model.block,
        stacked,
        x,
        combine(floats, others),
        model.plan,
        model.label,
        key,
        model.dtype,
        model.has_aux,
    )
    y, aux, saved = loops.forward((stacked, key), x, common)
    loss, pull_head = jax.vjp(
        lambda outer, y, aux: _loss(model, outer, y, aux, batch), outer, y, aux
    )
    d_outer, d_y, d_aux = pull_head(jnp.ones_like(loss))
    d_outer = jax.tree.leaves(d_outer)

    def back(state, fold_layer):
        into = lambda state, i, gradient: folded_at(
            fold_layer, state, i, split.whole(stacked, gradient)
        )
        return loops.backward((stacked, key), saved, d_y, d_aux, zeros(common[0]), state, into)

    def whole_gradients(d_x, d_common):
        (d_embed,) = pull_embed((d_x, d_common[: len(floats)]))
        return [a + b for a, b in zip(d_outer, jax.tree.leaves(d_embed))]

    if fold.clip.how == "norm":
        factor, gradients = _global_factor(fold, moments, back, whole_gradients)
        fold = dataclasses.replace(fold, factor=factor)
        _, _, layer_moments = back(layer_moments, fold)
        return (list(map(fold, outer_moments, gradients)), layer_moments), loss

    again = reads(jax.make_jaxpr(lambda outer: embed(outer)[0])(outer))
    early = [
        None if is_read else fold(s, g) for s, g, is_read in zip(outer_moments, d_outer, again)
    ]
    # what the head alone reads is let go before the loop
    d_y, early = jax.lax.optimization_barrier((d_y, early))
    d_x, d_common, layer_moments = back(layer_moments, fold)
    late = zip(early, outer_moments, whole_gradients(d_x, d_common))
    return ([fold(s, g) if done is None else done for done, s, g in late], layer_moments), loss


def _embedding(model: Model, batch, key, layers: int):
    """`embed(outer) -> (x, floats), others`, and `combine(floats, others)`: what layers share, as
    one tuple.
    """
    box: dict[str, Any] = {}

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
    loss = model.head(outer, y, *((aux,) if model.has_aux else ()), batch)
    if jnp.shape(loss) or not is_floating(loss):
        raise OptimizerError(
            f"released_step: `head` returned {jax.typeof(loss).str_short()}; expected the"
            " microbatch's mean loss, a"
            " floating-point scalar"
        )
    return loss


def _global_factor(fold: Fold, moments, back: Callable, whole_gradients: Callable):
    """By what a microbatch's gradient is scaled, from a backward that keeps each layer's norm; and
    the outer gradients.
    """
    outer_moments, layer_moments = moments
    axis = fold.rule.axis_name
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), layer_moments["mu"])
    none = zeros(layer_moments["squares"])
    d_x, d_common, squares = back(none, lambda _, g: squared(g, like, axis))
    gradients = whole_gradients(d_x, d_common)
    outside = [squared(g, s["mu"], axis) for g, s in zip(gradients, outer_moments)]
    finite = lambda a: jnp.where(jnp.isfinite(a), a, jnp.zeros((), a.dtype))
    return fold.clip.factor(sum(map(finite, outside), finite(squares).sum())), gradients

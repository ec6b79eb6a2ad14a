"""One microbatch of a released step: forward through embed, layers and head, and back with every
gradient folded.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._adama.fold import Fold, squared
from jaxmem._jax.jaxpr import reads
from jaxmem._jax.vary import zeros
from jaxmem._stack.arguments import is_floating, merged, separated
from jaxmem._stack.loops import folded_at
from jaxmem._stack.stack import loops_over
from jaxmem.errors import OptimizerError


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """A model as embed, layers and head, and what its layers' loop is given."""

    embed: Callable
    block: Callable
    head: Callable
    layers: str
    plan: Any
    label: str
    dtype: Any
    has_aux: bool

    def check(self, params) -> None:
        """Raises OptimizerError unless `params` has stacked layers and something else, of
        floating-point arrays.
        """
        if not isinstance(params, dict) or self.layers not in params:
            is_dict = isinstance(params, dict)
            got = (
                f"has {', '.join(map(repr, params))}" if is_dict else f"is {type(params).__name__}"
            )
            raise OptimizerError(
                f"released_step: `params` {got}; expected a dict with {self.layers!r}, the layers'"
                " parameters stacked (name"
                " another key with layers=...): a model that is no stack of layers takes"
                " jaxmem.adama as a transformation"
            )
        for path, a in jax.tree.leaves_with_path(params):
            if not jnp.issubdtype(jnp.result_type(a), jnp.inexact):
                raise OptimizerError(
                    f"released_step: `params{jax.tree_util.keystr(path)}` is {jnp.result_type(a)};"
                    " expected floating-point"
                    " arrays, which gradients are folded for"
                )

    def outer(self, params) -> dict:
        return {k: v for k, v in params.items() if k != self.layers}

    def started(self, params, mu, nu):
        """Moments with their tallies at 0: of each array outside the layers, and of the layers."""
        inner = jax.tree.leaves(params[self.layers])
        wide = jnp.promote_types(jnp.float32, jnp.result_type(*inner))
        tally = lambda *shape: {
            "squares": jnp.zeros(shape, wide),
            "skipped": jnp.zeros(shape, wide),
        }
        pairs = zip(jax.tree.leaves(self.outer(mu)), jax.tree.leaves(self.outer(nu)))
        layers = {"mu": mu[self.layers], "nu": nu[self.layers]} | tally(inner[0].shape[0])
        return [{"mu": m, "nu": v} | tally() for m, v in pairs], layers

    def joined(self, params, moments, name: str):
        """`mu` or `nu`, a dict like `params`, out of what `started` made."""
        outer, layers = moments
        whole = jax.tree.unflatten(jax.tree.structure(self.outer(params)), [c[name] for c in outer])
        return {k: layers[name] if k == self.layers else whole[k] for k in params}


def backward(parts: Parts, fold: Fold, params, moments, batch, key):
    """(moments, loss) after one microbatch, whose gradients are folded as they appear and never
    returned.
    """
    outer, stacked = parts.outer(params), params[parts.layers]
    outer_moments, layer_moments = moments
    embed, combine = _embedding(parts, batch, key, jax.tree.leaves(stacked)[0].shape[0])
    (x, floats), pull_embed, others = jax.vjp(embed, outer, has_aux=True)
    loops, split, common = loops_over(
        parts.block,
        stacked,
        x,
        combine(floats, others),
        parts.plan,
        parts.label,
        key,
        parts.dtype,
        parts.has_aux,
    )
    y, aux, saved = loops.forward((stacked, key), x, common)
    loss, pull_head = jax.vjp(
        lambda outer, y, aux: _loss(parts, outer, y, aux, batch), outer, y, aux
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
    d_y, early = jax.lax.optimization_barrier(
        (d_y, early)
    )  # what the head alone reads is let go before the loop
    d_x, d_common, layer_moments = back(layer_moments, fold)
    late = zip(early, outer_moments, whole_gradients(d_x, d_common))
    return ([fold(s, g) if done is None else done for done, s, g in late], layer_moments), loss


def _embedding(parts: Parts, batch, key, layers: int):
    """`embed(outer) -> (x, floats), others`, and `combine(floats, others)`: what layers share, as
    one tuple.
    """
    box: dict[str, Any] = {}

    def embed(outer):
        out = parts.embed(
            outer, batch, **({} if key is None else {"key": jax.random.fold_in(key, layers)})
        )
        x, *shared = out if isinstance(out, tuple) else (out,)
        leaves, box["tree"] = jax.tree.flatten(tuple(shared))
        box["which"] = tuple(map(is_floating, leaves))
        floats, others = separated(leaves, box["which"])
        return (x, floats), others

    return embed, lambda *pair: jax.tree.unflatten(box["tree"], merged(pair, box["which"]))


def _loss(parts: Parts, outer, y, aux, batch):
    loss = parts.head(outer, y, *((aux,) if parts.has_aux else ()), batch)
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

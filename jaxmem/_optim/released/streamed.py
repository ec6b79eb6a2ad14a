"""A minibatch of a released step whose layers' states are stored in host memory, whole or in part:
each layer's parameters are updated in the backward of the last microbatch.

A streamed step separates its last microbatch from the others, and updates each layer as it is
folded. So a layer's states are copied to the device once and back once in that backward (ProTrain
§3). The alternative is a pass over the layers after the minibatch, which would copy parameters and
moments once more. A resident step keeps its one loop, and updates whole stacks at the end. Both
steps round alike, since XLA does not know that the decays of the last microbatch are 1, and since
the arrays outside the layers are updated in one call.

The last microbatch runs in a loop of one iteration, and XLA cannot know that there is only one
(`_once`). If XLA inlined the loop, the last microbatch would be part of the same program as the
others. The stacks that it saves into begin as zeros, which wait for no other value: XLA made the
zeros before the first microbatch, or in one kernel with the zeros of the other microbatches, and
held both. A barrier over all values that the last microbatch reads was tried, and changed nothing.

Barriers stand where a loop of one iteration would end. XLA inlines such a loop, and fuses
operations that a longer loop separates: the fold of a stack of one layer with the update of that
layer. On a CPU, LLVM then contracts other products into fused multiply-adds. So a streamed step has
a barrier between the moments and the update. A resident step has a barrier for stacks of one layer
alone, which costs models of several layers nothing. The update then reads the stored moments.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem._model.loop.loops import fetched_first
from jaxmem._model.states.stacks import joined_shapes, parts_of, read_of
from jaxmem._model.states.stacks import like as as_layers
from jaxmem._model.states.store import brought
from jaxmem._optim.adama.rule import Moments, Rule
from jaxmem._optim.released.backward import backward
from jaxmem._optim.released.fold import Fold, Folds, entries
from jaxmem._optim.released.gather import whole_layer, whole_outside
from jaxmem._optim.released.model import Model


def minibatch(
    model: Model,
    rule: Rule,
    fold_of: Callable[..., Fold],
    like,
    state,
    microbatches,
    key_of,
    divided: bool,
):
    """Returns ((params, state), moments with their tallies, losses (microbatches,)).

    fold_of: the `Fold` of the microbatch of a number, and of what makes a component's new
      parameters, or None.
    like: the parameters with their whole shapes.
    state: the pair (params, state), of whose arrays a device may have a part (ZeRO-3): it then
      gathers a layer as it comes to it, and updates its own part. Rows are in as many stacks as
      the moments.
    divided: whether a device has a part of the moments.
    microbatches: a pair of numbers and of the batch's arrays, each with a leading axis of
      microbatches.
    key_of: the random key of the microbatch of a number, or None.
    """
    params, old = state
    moments = model.started(params, entries(old.moments))
    outside_mask, layer_mask = _masks(rule, model, params)

    def updated(params, moments, mask, whole, stacked=None):
        masked = dataclasses.replace(rule, mask=mask)
        moments, nu = rule.settled(moments, old.count, whole if divided else None, stacked)
        new = optax.apply_updates(params, masked.updates(moments.mu, nu, old.count, params))
        return new, moments

    whole = whole_layer(model, like, rule.axis_name)
    gathered = whole_outside(model, params, like, rule.axis_name)

    def update(own, new, shapes):
        # The update reads the moments that are stored. Fused with their fold, XLA would compute
        # them once more, and may round them otherwise.
        return updated(own, jax.lax.optimization_barrier(new), layer_mask, shapes, False)

    def one(carry, numbered, update=None):
        (moments, held), (i, part) = carry, numbered
        own = gathered
        if update is not None:
            # Parameters that are replaced are read from the loop's carry by the forward too: read
            # from outside of it, their stacks in host memory would be copied.
            stacks = as_layers(params[model.layers], [m["params"] for m in moments[1]])
            own = gathered | {model.layers: stacks}
        # Nothing is folded yet, so that this is the fold of microbatch i. But XLA does not know it:
        # where it knew that the last one's decays are 1, it would round otherwise.
        number = i + old.folded
        folds = Folds([fold_of(number)] * len(moments[0]), fold_of(number, update))
        moments, loss, held = backward(model, folds, own, moments, part, key_of(i), whole, held)
        return (moments, held), loss

    # All microbatches but the last fold alone, and read the parameters from outside of their loop.
    before, last = (jax.tree.map(lambda a, s=s: a[s], microbatches) for s in (slice(-1), -1))
    carry = moments, fetched_first(read_of(gathered[model.layers]))
    if not rule.single:
        carry, losses = jax.lax.scan(one, carry, before)
    (outer, layers), held = carry
    with_params = [m | {"params": p} for m, p in zip(layers, parts_of(params[model.layers]))]
    carry = (outer, with_params), held
    if rule.single:
        ((outer, layers), _), loss = one(carry, last, update)
        losses = loss[None]
    else:
        and_update = lambda carried, last: one(carried[0], last, update)
        ((outer, layers), _), loss = _once(and_update, (carry, losses[-1]), last)
        losses = jnp.concatenate([losses, loss[None]])

    stacks = as_layers(params[model.layers], [m["params"] for m in layers])
    moments = {k: model.joined(params, (outer, layers), k) for k in entries(old.moments)}
    # One call for all: XLA multiplies by the reciprocal where a scalar divides one array alone, so
    # that a call for each would round otherwise than the resident step.
    of_outer = Moments(**{k: model.outer(tree) for k, tree in moments.items()})
    outside: Any
    outside, settled = updated(
        model.outer(params), brought(of_outer), outside_mask, model.outer(like), False
    )
    for k in entries(settled).keys() - {"mu", "nu"}:
        moments[k] |= getattr(settled, k)
    new = {k: stacks if k == model.layers else outside[k] for k in params}
    count, folded = optax.safe_increment(old.count), jnp.zeros_like(old.folded)
    made = old._replace(count=count, folded=folded, **moments)
    return (new, made), (outer, layers), losses


def _once(body: Callable, carry, given):
    """`body(carry, given)`, as a loop of one turn, which XLA does not take apart, since it cannot
    tell how many turns there are.

    Taken apart, the last microbatch would stand beside the others, and XLA would hold the stacks of
    what it saves together with theirs: they begin as zeros, which wait for nothing. Nor is it fused
    with what came before, as behind the end of a longer loop, in a resident step.
    """

    def turn(i, carry):
        # What is computed of `given` alone would be computed before the loop.
        _, here = jax.lax.optimization_barrier((i, given))
        return body(carry, here)

    return jax.lax.fori_loop(0, jax.lax.optimization_barrier(jnp.int32(1)), turn, carry)


def _masks(rule: Rule, model: Model, params) -> tuple[Any, Any]:
    """Which weights decay outside the layers, and in a layer: as the mask says of the whole
    parameters, where the layers are stacked in one.
    """
    whole = {k: joined_shapes(v) if k == model.layers else v for k, v in params.items()}
    mask: Any = rule.mask
    if callable(mask):
        # It is shown what it is shown in a resident step: traced arrays of these shapes.
        box: Any = []
        jax.eval_shape(lambda params: box.append(rule.mask(params)), whole)
        mask = box[0]
    if not isinstance(mask, dict):  # one word for all, or None
        return mask, mask
    return model.outer(mask), mask[model.layers]

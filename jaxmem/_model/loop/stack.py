"""stack(): runs L identical layers from stacked parameters, with a backward loop of its own.

The backward that JAX derives for a scan saves values that a layer makes of its parameters, such as
bfloat16 copies, and returns all gradients stacked. This backward reads the parameters again by
index, and passes each layer's gradient on as soon as the gradient exists.

With `moments`, the new moments are returned as the gradient with respect to the old moments. So one
`jax.grad` serves embedding, stack and head, and no second interface is needed. The price is that
moments must be floating point, as gradients are.

The alternative is JAX's own backward of a scan: an identity on each layer's parameters, whose
`jax.custom_vjp` rule folds the gradient into a `jax.Ref`. It gives the bits of this backward, and
on an H200 its bytes (`tests/stack/test_references.py`). It could replace the loops of `Loops` and
the pullback of a layer for states on the device, and serve layers outside a stack. It cannot
replace them for streamed states: in JAX 0.12 a reference forgets that its array is in host memory.

A layer is folded into as a batch of one: `folded_at` maps the fold over an axis of length 1. XLA
updates a slice of a stack in place, as it reads the slice, only if neither a reshape nor a product
with a number that is no array stands between reading and writing. Otherwise XLA copies the layer
first. For the same reason, decay rates are made arrays (`_optim/released/fold.py`). The memory
traffic of the folds fell from ten passes to six, on GPUs as on CPUs. `tests/stack/test_in_place.py`
looks for such copies.
"""

from collections.abc import Callable, Sequence

import jax

from jaxmem._model.loop.arguments import ParameterSplit, check, check_moments, lifted
from jaxmem._model.loop.loops import Loops, fetched_first, runs_of
from jaxmem._model.states.layout import (
    Copied,
    buffers_of,
    like,
    masters_of,
    one_layer,
    parts_of,
    read_of,
)
from jaxmem._model.states.store import fetch, returned, streams
from jaxmem._model.tags.policy import groups_of
from jaxmem._trace.vary import zeros
from jaxmem.errors import StackError


def stack(
    block: Callable,
    params,
    x,
    *shared,
    plan=None,
    label: str = "block",
    key=None,
    dtype=None,
    has_aux: bool = False,
    moments=None,
    fold: Callable | None = None,
):
    """Runs `x = block(p_i, x, *shared)` for each layer i of L layers, under a plan, and returns x.

    `stack` is differentiable in `params`, `x` and `shared`, in reverse mode only. For each layer,
    the forward loop saves the tagged tensors according to the plan's actions. The backward loop
    processes one layer at a time: it restores the saved tensors, recomputes the other tensors, and
    computes the layer's gradient. The backward reads a layer's parameters again. Parameters are
    never saved.

    block: the function of one layer. If `key` is given, `block` is called with `key=` too.
    params: a tree of the layers' parameters. Each array has a leading axis L, with one entry per
      layer. Parameters in host memory are copied to the device one layer at a time, and their
      gradients are copied to host memory one layer at a time.
    x: a tree of floating-point arrays. `block` returns a tree of the same structure, shapes and
      dtypes.
    shared: arrays that all layers read, such as masks and positions.
    plan: a `jaxmem.Plan` or a `jaxmem.plans.Assignment`. None keeps every tensor.
    label: the label of the layers' block in the plan.
    key: a random key. Layer i receives `jax.random.fold_in(key, i)`. None passes no key.
    dtype: the dtype in which layers receive their floating-point parameters. The parameters are
      converted one layer at a time. None leaves the dtypes as they are.
    has_aux: whether `block` returns (x, aux). `stack` then returns (x, aux), where aux holds the
      aux of all layers, stacked.
    moments: a tree of floating-point arrays with a leading axis L. With `moments`, `stack` returns
      no gradient of `params`. Instead, `fold(moments_i, gradient_i)` replaces layer i of `moments`,
      in place.
    fold: the function that merges a layer's gradient into the layer's moments. `moments` and `fold`
      are given together, or not at all.

    With `moments`, `jax.grad` returns the *updated moments* in place of the gradient of `moments`,
    and zeros for `params`. No layer's gradient is kept (AdamA §3.2).

    Raises StackError if `params`, `x`, the result of `block`, or `moments` do not have these
    shapes, or if only one of `moments` and `fold` is given. Raises TagError if the plan was made
    for other layers or for another block.
    """
    if (moments is None) != (fold is None):
        missing, given = ("moments", "fold") if moments is None else ("fold", "moments")
        raise StackError(
            f"stack: `{given}` is given and `{missing}` is not; expected both, or neither"
        )
    if moments is not None:
        check_moments(moments, params)
    given = plan, label, key, dtype, has_aux
    loops, split, common = loops_over(block, params, x, shared, *given, states=moments)

    @jax.custom_vjp
    def run(params, x, common, moments, key):  # runs if nothing is differentiated
        return loops.plain(read_of(params), key, x, common)

    def run_forward(params, x, common, moments, key):
        stacks = read_of(params)
        if fold is None and any(isinstance(part, Copied) for part in parts_of(params)):
            raise StackError(
                "stack: `params` has layers with copies, and is differentiated; expected layers"
                " without, split(state, persist, copies=0), since an update of the parameters would"
                " leave the copies as they were"
            )
        x, aux, saved, held = loops.forward(stacks, key, x, common, fetched_first(stacks))
        return (x, aux), (params, common, moments, key, saved, held)

    def run_backward(residuals, cotangents):
        params, common, moments, key, saved, held = residuals
        stacks = read_of(params)
        # Without a fold, each layer's gradient fills its slice of a buffer of the parameters'
        # shape. If the parameters are stored in host memory, `into` returns the gradient as its
        # second result, and the loop stacks the gradients there. With a fold, the moments are the
        # buffer, and no gradient is stored after its layer.
        if fold is None:
            masters = masters_of(params)
            states = [() if streams(part) else zeros(split.floating(part)) for part in masters]

            def into(k, state, i, gradient, parameters):
                if state:
                    return gradient, ()
                return (), returned(split.whole(one_layer(masters[k]), gradient), masters[k])
        else:
            states = parts_of(moments)
            into = lambda k, state, i, gradient, parameters, fold=fold: (
                folded_at(fold, state, i, split.whole(parameters, gradient)),
                (),
            )
        d_x, d_common, states, told, _ = loops.backward(
            lambda k, _: stacks[k],
            key,
            saved,
            held,
            (*cotangents, zeros(common[0])),
            states,
            into,
        )
        # None is a zero cotangent: for arrays without a derivative, and for `params` with a fold.
        # The new moments are returned as the gradient of the old moments, so that one `jax.grad`
        # serves embedding, stack and head.
        if fold is None:
            rows = zip(masters, states, told)
            whole = [split.whole(part, s) if s else t for part, s, t in rows]
            return like(params, whole), d_x, (d_common, None), None, None
        return None, d_x, (d_common, None), like(moments, states), None

    run.defvjp(run_forward, run_backward)
    y, aux = run(params, x, common, moments, key)
    return (y, aux) if has_aux else y


def loops_over(
    block: Callable,
    params,
    x,
    shared: tuple,
    plan,
    label: str,
    key,
    dtype,
    has_aux: bool,
    whole: Callable = lambda layer: layer,
    states=(),
    frozen: Sequence | None = None,
):
    """Makes the loops that `stack` and the released step run.

    Returns the `Loops`; the `ParameterSplit`; and the arrays that all layers share, as a pair of
    the differentiated arrays and the other arrays.

    The arguments are the arguments of `stack`, with `shared` as one tuple. `whole` gathers a
    layer's parameters if `params` has a device's parts. `states` are the states that the backward
    replaces. `frozen` has, for each stack of `params`, a tree of arrays without a gradient; `block`
    then receives the pair of both trees. Raises errors as `stack` does.
    """
    lengths = check(params, x)
    spans = len(lengths) == 1 and not streams((params, states, frozen))
    groups = groups_of(plan, label, sum(lengths), label if spans else "")
    runs = runs_of(groups, lengths, buffers_of(params))
    without = 0 if frozen is None else len(jax.tree.leaves(frozen[0]))
    split = ParameterSplit.of(with_frozen(masters_of(params), frozen)[0], dtype, without)
    own = lambda layer, key, i: split.own(whole(layer), key, i)
    first = own(fetch(with_frozen(read_of(params), frozen)[0], 0), key, 0)
    call, common = lifted(block, split, first, x, shared, has_aux)
    return Loops(call, own, runs), split, common


def with_frozen(stacks: Sequence, frozen: Sequence | None) -> Sequence:
    """Returns the pairs of each stack and the frozen arrays of its layers; the stacks alone if
    `frozen` is None.
    """
    return stacks if frozen is None else [*zip(stacks, frozen, strict=True)]


def folded_at(fold: Callable, state, i, gradient):
    """Returns `fold(layer, gradient)` for layer `i` of the stacked arrays `state`.

    The fold waits for the gradient behind a barrier, so that XLA does not divide the fold and store
    parts of it through the layer's backward. The layer itself is read before the barrier: the copy
    from host memory is then overlapped with the backward's products.
    """
    (gradient,) = jax.lax.optimization_barrier((gradient,))
    # The fold is mapped over a batch of one layer, so that the layer keeps its axis from reading to
    # writing. Only then does XLA update the slice in place: with a reshape between reading and
    # writing, XLA would copy the layer first, in two more passes over the state.
    layer = fetch(state, i)
    batch_of_one = jax.tree.map(lambda a: a[None], (layer, gradient))
    try:
        new = jax.vmap(fold)(*batch_of_one)
    except (
        Exception
    ):  # an ordered callback cannot be mapped; another error of `fold` is raised again here
        return fold(layer, gradient)
    return jax.tree.map(lambda a: a[0], new)

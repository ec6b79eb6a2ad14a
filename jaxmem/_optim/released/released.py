"""`jaxmem.released_step`: makes a training step that releases each layer's gradient.

The step folds a layer's gradient into Adam's moments, or updates the layer, and frees the gradient.
"""

import functools
from collections.abc import Callable
from typing import overload

import optax

from jaxmem._core.groups import AUTO
from jaxmem._optim.adama.transform import AdamA
from jaxmem._optim.released.accumulated import Accumulated
from jaxmem._optim.released.direct import Direct
from jaxmem._optim.released.fold import Clip
from jaxmem._optim.released.loss import LossStep, stored_under
from jaxmem._optim.released.model import Model
from jaxmem._optim.released.step import ReleasedStep
from jaxmem.errors import OptimizerError


@overload
def released_step(
    tx: optax.GradientTransformation,
    loss: Callable,
    /,
    *,
    plan=None,
    label: str = AUTO,
    has_aux: bool = False,
    clip: tuple[str, float] | None = None,
    axis_name: str | None = None,
    trainable=None,
) -> LossStep: ...


@overload
def released_step(
    tx: optax.GradientTransformation,
    embed: Callable,
    block: Callable,
    head: Callable,
    *,
    layers: str = "layers",
    plan=None,
    label: str = "block",
    dtype=None,
    has_aux: bool = False,
    clip: tuple[str, float] | None = None,
    axis_name: str | None = None,
) -> ReleasedStep: ...


def released_step(
    tx: optax.GradientTransformation,
    embed: Callable,
    block: Callable | None = None,
    head: Callable | None = None,
    *,
    layers: str = "layers",
    plan=None,
    label: str | None = None,
    dtype=None,
    has_aux: bool = False,
    clip: tuple[str, float] | None = None,
    axis_name: str | None = None,
    trainable=None,
) -> ReleasedStep | LossStep:
    """Makes a training step that releases each layer's gradient as soon as the gradient exists.

    The step never stores the gradient of the whole model. With AdamA, the step folds each layer's
    gradient into Adam's moments (AdamA §3.2). With another optax transformation, the step updates
    each layer by its gradient at once (LOMO). In both cases, the step then frees the gradient.

    tx: the optimizer. An optimizer from `jaxmem.adama`, `jaxmem.adamaw_a` or
      `jaxmem.scale_by_adama` takes any number of microbatches. An optax transformation must update
      each array independently of the other arrays, as `optax.adamw`, `lion`, `sgd` and `rmsprop`
      do, and chains of these with schedules and masks. An optax transformation takes a batch as one
      microbatch.
    embed: the function before the layers, `embed(outer, microbatch)`. It returns x, or a tuple of x
      and the arrays that all layers share. Without `block` and `head`, a whole loss,
      `loss(params, microbatch)`; see below.
    block: the function of one layer, `block(p_i, x, *shared) -> x`.
    head: the function after the layers, `head(outer, x, microbatch) -> loss`. The loss is a mean.
    layers: the key of the layers' parameters in the dict of all parameters. The layers' parameters
      are stacked, as for `jaxmem.stack`. All other parameters are called `outer`.
    plan, label, dtype: as for `jaxmem.stack`; the default of `label` is "block", and "auto" with a
      whole loss, whose tensors get the tags of `jaxmem.auto`. Under a plan whose `moments` are
      "int8", the step stores the optimizer's moments in 8 bits, as `ReleasedStep.quantized` does.
    has_aux: whether `block` returns (x, aux). `head` then receives the aux of all layers, stacked,
      after x. With a whole loss, whether the loss returns a pair of the loss and a tree of arrays,
      such as new statistics of a batch norm. `metrics["aux"]` is the tree; for AdamA, its arrays
      have a leading axis of microbatches.
    clip: how gradients are clipped. None clips nothing. ("value", c) clips each value.
      ("component", c) clips the norm of each layer's gradient, and of each array's gradient outside
      the layers. ("norm", c) clips the exact global norm of a microbatch's gradient. For the global
      norm, the layers' backward runs twice, and a step takes 1.5 to 1.7 times as long
      (benchmarks/adama.py).
    axis_name: the mesh axis over whose devices the gradients for an optax transformation are
      averaged. For AdamA, pass `axis_name` to `jaxmem.adama`. None means one device.
    trainable: the parameters of a whole loss that are trained: a tree of booleans like `params`, in
      which one boolean may stand for a branch, or a function that returns such a tree for the
      parameters' shapes. None trains all parameters. See below.

    If the step receives a key, `embed` and `block` are called with `key=` too. The gradient of an
    array outside the layers is used once the gradient is complete. If only `head` reads the array,
    the gradient is complete before the layers' backward. If `embed` reads the array too, as with
    tied embeddings, the gradient is complete at the end of the backward.

    **A whole loss.** `released_step(tx, loss)` takes a loss as it is, `loss(params, microbatch)` or
    `loss(params, microbatch, key)`, and returns a step with `init(params, batch)`. Microbatch i
    receives entry i of `jax.random.split(key, n)`, where n is the number of microbatches: 1 for an
    optax transformation, whose loss receives `jax.random.split(key, 1)[0]`. `params` is any tree of
    floating-point arrays, and the state keeps this tree. jaxmem traces the loss and finds the
    layers with most FLOPs: the iterations of a `jax.lax.scan` that reads slices of parameters, or
    the equal layers of Python loops. If a loss has neither, as a U-Net may, each product that reads
    trained parameters begins a layer, with what follows it. The leaves of `params` that the scan
    slices are the layers' parameters, and nothing else may read them. The scan may carry
    floating-point arrays, a counter, and arrays that it does not change. A layer of a Python loop
    needs a parameter that nothing else reads. Without a plan, the layers keep their own
    checkpoints; with a plan, their tensors get the tags of `jaxmem.auto`. `plan`, `label` and
    `clip` are as for three functions; a second Python loop has the label `label_2`, and layers that
    are unlike each other have the labels of `jaxmem.auto`. The step raises NoLayersError for a loss
    without layers.

    **Frozen parameters.** A parameter that `trainable` leaves out is frozen. The step computes no
    gradient of it, stores no moments for it, and returns its array as it is. The optimizer receives
    trees with None in place of frozen parameters, as Equinox's `partition` makes them, and the
    optimizer's state is `tx.init` of such a tree. A frozen parameter may have any dtype, such as
    int8 or uint8. The frozen arrays of a layer move to host memory with the layer's states, and are
    never written back.

    An optax transformation receives the arrays of one layer at a time, without the axis of layers,
    as `block` does. A trust ratio or a factored moment therefore belongs to one layer, and the
    function of a mask receives arrays without the axis of layers. When a state is made, jaxmem
    traces `tx.update` and follows the arrays through the trace. The update of an array may depend
    on the array's own gradient, value and state, and on values that depend on no gradient, such as
    a counter.

    Raises OptimizerError if `tx` is another object or needs the whole gradient, if `clip` has
    another form, and for functions that are not callable. The step raises OptimizerError for
    parameters or a batch that do not fit, and for a `tx` that updates one array by another array's
    gradient.
    """
    is_loss = block is None and head is None
    functions = {"loss": embed} if is_loss else {"embed": embed, "block": block, "head": head}
    for name, function in functions.items():
        if not callable(function):
            raise OptimizerError(
                f"released_step: `{name}` is {type(function).__name__}; expected a function"
            )
    tx = stored_under(plan, tx)
    optimizer = _optimizer(tx, axis_name)
    if block is not None and head is not None:
        if trainable is not None:
            raise OptimizerError(
                "released_step: `trainable` is given with three functions; expected it with a whole"
                " loss, released_step(tx, loss, trainable=...), or functions that close over the"
                " frozen parameters"
            )
        label = "block" if label is None else label
        model = Model(embed, block, head, layers, plan, label, dtype, has_aux)
        return ReleasedStep(optimizer, model, Clip.of(clip))
    if (layers, dtype) != ("layers", None):
        raise OptimizerError(
            "released_step: `layers` or `dtype` is given with a whole loss; expected neither: the"
            " loss's own trace says which parameters are the layers', and in which dtype; or give"
            " embed, block and head"
        )
    axis, label = optimizer.axis_name, AUTO if label is None else label
    return LossStep(tx, embed, plan, label, Clip.of(clip), has_aux, trainable, axis)


def _optimizer(tx, axis_name: str | None) -> Accumulated | Direct:
    """Returns the optimizer of the step. Raises OptimizerError for a `tx` that it cannot use."""
    if not isinstance(tx, AdamA):
        if problem := _problem(tx):
            raise OptimizerError(f"released_step: `tx` is {problem}")
        return Direct(tx, axis_name)
    if tx.rule.nesterov:
        raise OptimizerError(
            "released_step: `tx` has `nesterov`, whose update needs the whole gradient; use"
            " jaxmem.adama without, or optax.nadam"
        )
    if not isinstance(tx.rule.accumulation_steps, int):
        raise OptimizerError(
            "released_step: `tx` has a traced `accumulation_steps`; expected a Python int"
        )
    if axis_name not in (None, tx.rule.axis_name):
        raise OptimizerError(
            f"released_step: `axis_name` is {axis_name!r}, and that of `tx` is"
            f" {tx.rule.axis_name!r}; expected it of jaxmem.adama(..., axis_name=...) alone"
        )
    return Accumulated(tx)


def _problem(tx) -> str | None:
    """Returns the end of an error's sentence about a `tx` that is not AdamA and cannot be used;
    None if no fault shows without parameters.
    """
    called = _transformations(getattr(tx, "update", None))
    names = {getattr(f, "__qualname__", "").split(".")[0] for f in called}
    if "clip_by_global_norm" in names:
        return (
            "a chain with optax.clip_by_global_norm; a global norm needs every layer's gradient at"
            " once, and each is let go as it appears: expected the chain without it, with"
            " clip=('value', c), clip=('component', c), or clip=('norm', c), which is exact and"
            " takes a second backward"
        )
    if "lookahead" in names:
        return (
            "optax.lookahead, or holds it; it wants parameters twice, fast ones and slow ones"
            " (LookaheadParams), and a released step updates one tree of them: expected the"
            " optimizer that it wraps, beside which you keep the slow ones, and every k steps"
            " go on from slow = optax.incremental_update(params, slow, rate)"
        )
    if AdamA.__module__ in {getattr(f, "__module__", None) for f in called}:
        return (
            "a chain with jaxmem.adama; expected what jaxmem.adama, adamaw_a or scale_by_adama"
            " returned, alone: rates, schedules and decay are its arguments, and clipping is `clip`"
        )
    if not isinstance(tx, optax.GradientTransformation):
        return (
            f"{type(tx).__name__}; expected what jaxmem.adama, adamaw_a or scale_by_adama returned,"
            " which have microbatches, or an optax transformation such as optax.adamw"
        )
    return None


def _transformations(update, depth: int = 4) -> set[Callable]:
    """Returns the update functions in the closure of a function, and in their closures.

    The closure of the function of `optax.chain` has the update functions of the chain's parts.
    `depth` bounds the number of nested chains.
    """
    if not callable(update) or not depth:
        return set()
    update = update.func if isinstance(update, functools.partial) else update
    held = [c.cell_contents for c in getattr(update, "__closure__", None) or ()]
    inner = [f for h in held for f in (h if isinstance(h, tuple | list) else (h,))]
    # such as "clip_by_global_norm.<locals>.update_fn"
    return {update}.union(*(_transformations(getattr(f, "update", f), depth - 1) for f in inner))

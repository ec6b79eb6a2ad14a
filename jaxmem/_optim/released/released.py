"""released_step(): makes a training step whose backward uses each layer's gradient and lets it go:
folds it into Adam's moments, or updates the layer.
"""

import functools
from collections.abc import Callable

import optax

from jaxmem._optim.adama.transform import AdamA
from jaxmem._optim.released.accumulated import Accumulated
from jaxmem._optim.released.direct import Direct
from jaxmem._optim.released.fold import Clip
from jaxmem._optim.released.model import Model
from jaxmem._optim.released.step import ReleasedStep
from jaxmem.errors import OptimizerError


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
) -> ReleasedStep:
    """Makes a training step that never holds a model's gradient: each layer's is used as it
    appears, and let go. It is folded into Adam's moments (AdamA §3.2), or it updates the layer at
    once (LOMO).

    tx: from `jaxmem.adama` or its kin, with any number of microbatches; or an optax transformation
      in which every array stands alone, such as `optax.adamw`, `lion`, `sgd`, `rmsprop`, and chains
      of such, with schedules and masks. It takes a batch as one microbatch.
    embed: `embed(outer, microbatch) -> x`, or a tuple of x and what all layers share.
    block: one layer, `block(p_i, x, *shared) -> x`.
    head: `head(outer, x, microbatch) -> loss`, a mean.
    layers: the key of the layers' parameters, stacked as for `jaxmem.stack`, in the dict that the
      parameters are; all others are `outer`.
    plan, label, dtype: those of `jaxmem.stack`.
    has_aux: `block` returns (x, aux), and `head` is called with every layer's aux after x.
    clip: None; ("value", c); ("component", c), the norm of each layer and of each array outside; or
      ("norm", c), the exact global norm of a microbatch's gradient, for which the layers' backward
      runs twice: 1.5 to 1.7 times the step (benchmarks/adama_time.py).
    axis_name: the mesh axis over whose devices an optax transformation is given mean gradients;
      `jaxmem.adama` has its own.

    With a key, `embed` and `block` are called with `key=` too. Outside the layers an array's
    gradient is used when it is whole: what `head` alone reads, before the layers' backward; what
    both read, such as tied embeddings, at the end.

    An optax transformation sees one layer's arrays at a time, as `block` does: a trust ratio or a
    factored moment is a layer's, and a mask's function is shown arrays without the axis of layers.
    When the state is made, `tx.update` is traced, and arrays are followed through it: the update of
    each may depend on its own gradient, value and state, and on what depends on no gradient, such
    as a counter.

    Raises OptimizerError if `tx` is neither, or needs the whole gradient; for arguments that are
    not callable; when called, for parameters or a batch that do not fit, or a `tx` that updates one
    array by another's gradient.
    """
    for name, function in (("embed", embed), ("block", block), ("head", head)):
        if not callable(function):
            raise OptimizerError(
                f"released_step: `{name}` is {type(function).__name__}; expected a function"
            )
    return ReleasedStep(
        _optimizer(tx, axis_name),
        Model(embed, block, head, layers, plan, label, dtype, has_aux),
        Clip.of(clip),
    )


def _optimizer(tx, axis_name: str | None) -> Accumulated | Direct:
    """What the step does with gradients. Raises OptimizerError for what it cannot use."""
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
    """Says what is wrong with a `tx` that is no AdamA, as the end of an error's sentence, as far as
    it can be told without parameters.
    """
    called = _transformations(getattr(tx, "update", None))
    names = {getattr(f, "__qualname__", "").split(".")[0] for f in called}
    if "clip_by_global_norm" in names:
        return (
            "a chain with optax.clip_by_global_norm; a global norm needs every layer's gradient at"
            " once, and each is let go"
            " as it appears: expected the chain without it, with clip=('value', c),"
            " clip=('component', c), or"
            " clip=('norm', c), which is exact and takes a second backward"
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
    """The update functions that a function calls, as far as its closure tells.

    `optax.chain` keeps the parts' update functions in its own function's closure. `depth` bounds
    how many chains within chains are opened.
    """
    if not callable(update) or not depth:
        return set()
    update = update.func if isinstance(update, functools.partial) else update
    held = [c.cell_contents for c in getattr(update, "__closure__", None) or ()]
    inner = [f for h in held for f in (h if isinstance(h, tuple | list) else (h,))]
    # such as "clip_by_global_norm.<locals>.update_fn"
    return {update}.union(*(_transformations(getattr(f, "update", f), depth - 1) for f in inner))

"""released_step(): makes a training step whose backward folds each layer's gradient into Adam's
moments and lets it go.
"""

from collections.abc import Callable

from jaxmem._adama.fold import Clip
from jaxmem._adama.model import Model
from jaxmem._adama.step import ReleasedStep
from jaxmem._adama.transform import AdamA
from jaxmem.errors import OptimizerError


def released_step(
    tx: AdamA,
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
) -> ReleasedStep:
    """Makes a training step that never holds a model's gradient: each layer's is folded into Adam's
    moments as it appears, and let go (AdamA §3.2).

    tx: from `jaxmem.adama` or its kin.
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

    With a key, `embed` and `block` are called with `key=` too. Outside the layers an array is
    folded when its whole gradient exists: what `head` alone reads, before the layers' backward;
    what both read, such as tied embeddings, at the end.

    Raises OptimizerError if `tx` is no AdamA, such as a chain, or needs the whole gradient; for
    arguments that are not callable; when called, for parameters or a batch that do not fit.
    """
    if not isinstance(tx, AdamA):
        raise OptimizerError(f"released_step: `tx` is {_named(tx)}")
    if tx.rule.nesterov:
        raise OptimizerError(
            "released_step: `tx` has `nesterov`, whose update needs the whole gradient; use"
            " jaxmem.adama without"
        )
    if not isinstance(tx.rule.accumulation_steps, int):
        raise OptimizerError(
            "released_step: `tx` has a traced `accumulation_steps`; expected a Python int"
        )
    for name, function in (("embed", embed), ("block", block), ("head", head)):
        if not callable(function):
            raise OptimizerError(
                f"released_step: `{name}` is {type(function).__name__}; expected a function"
            )
    return ReleasedStep(
        tx, Model(embed, block, head, layers, plan, label, dtype, has_aux), Clip.of(clip)
    )


def _named(tx) -> str:
    """Says what is wrong with a `tx` that is no AdamA, as the end of an error's sentence."""
    names = _transformations(getattr(tx, "update", None))
    if "clip_by_global_norm" in names:
        return (
            "a chain with optax.clip_by_global_norm; a global norm needs every layer's gradient at"
            " once, and each is let go"
            " as it appears: expected jaxmem.adama(...) alone, with clip=('value', c),"
            " clip=('component', c), or"
            " clip=('norm', c), which is exact and takes a second backward"
        )
    return (
        f"{type(tx).__name__}; expected what jaxmem.adama, adamaw_a or scale_by_adama returned,"
        " alone: rates, schedules and"
        " decay are its arguments, and clipping is `clip`"
    )


def _transformations(update, depth: int = 4) -> set[str]:
    """Names of the optax functions whose updates a function calls, as far as its closure tells.

    `optax.chain` keeps the parts' update functions in its own function's closure. `depth` bounds
    how many chains within chains are opened.
    """
    if not callable(update) or not depth:
        return set()
    held = [c.cell_contents for c in getattr(update, "__closure__", None) or ()]
    inner = [f for h in held for f in (h if isinstance(h, tuple | list) else (h,))]
    # such as "clip_by_global_norm.<locals>.update_fn"
    name = getattr(update, "__qualname__", "").split(".")[0]
    return {name}.union(*(_transformations(getattr(f, "update", f), depth - 1) for f in inner))

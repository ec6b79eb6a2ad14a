"""Compares the loss and the gradient of a GPT under each action and each named policy with the
unplanned step on this device.

The layers run in a scan or in a stack, with both dropouts. In float32, the loss must equal the
unplanned loss to 1e-6, since XLA chooses a GPU's matrix kernels per program; rows show whether it
is bit-equal. In float64, a lossless gradient must equal the unplanned gradient to 1e-10 of each
parameter's largest entry. Under compression, 1 - cosine of the gradients must be at most 0.1. On a
CPU an offload moves no bytes, but runs the same program.
"""

import functools

import jax
import numpy as np

import jaxmem
from experiments.gpu_check.parts.stack import plan_of
from experiments.gpu_check.settings import Settings
from experiments.models.loops import Loop, scanned, stacked
from experiments.running import policies as baselines
from experiments.steps.step import init_state, make_loss
from jaxmem.plans import LOSSLESS, Action, Choice

LOSSY = {a for a in Action if a not in LOSSLESS}
SIZES = ("model.attention_dropout=0.1", "train.batch=4")
NEAR, CLOSE, ALIKE = 1e-6, 1e-10, 0.1


def points(settings: Settings) -> list[str]:
    if settings.small:
        return [*(f"action {a}" for a in Action if a.offloads), "stack groups"]
    named = [
        n for n in baselines.FIXED if n not in ("keep_everything", "keep_tags", "compress_tags")
    ]
    tags = [f"offload {tag}" for tag in baselines.KINDS]
    stacks = [f"stack {a}" for a in ("everything", *Action, "groups")]
    return [
        *(f"action {a}" for a in Action),
        *stacks,
        *(f"policy {n}" for n in named),
        "policy every_k=2",
        *tags,
    ]


def choose(point: str, layers: int) -> tuple[Loop, bool]:
    """Returns the loop over the layers, and whether its actions are lossless."""
    what, name = point.split()
    if what == "stack":
        return stacked(plan_of(name, layers)), name not in LOSSY
    if what == "action":
        return scanned(jaxmem.remat_policy(plan_of(name, layers))), name not in LOSSY
    if what == "offload":
        others = dict.fromkeys(baselines.KINDS, Choice(Action.KEEP))
        return scanned(baselines.policy_of(others | {name: Choice(Action.OFFLOAD)})), True
    if name == "every_k=2":
        return scanned(jax.checkpoint_policies.nothing_saveable, 2), True
    fixed = baselines.JAX_POLICIES.get(name) or baselines.policy_of(baselines.ASSIGNMENTS[name])
    return scanned(fixed), name not in baselines.LOSSY


def measure(point: str, settings: Settings, rows: dict[str, dict]) -> dict:
    loop, lossless = choose(point, settings.config("gpt_nano", *SIZES).model.layers)
    loss, gradient = at("float32", settings, loop)
    plain_loss, plain = reference("float32", settings)
    relative = abs(float(loss) / float(plain_loss) - 1)
    row = {
        "lossless": lossless,
        "loss": float(loss),
        "loss_bit_equal": bool(loss == plain_loss),
        "loss_relative": relative,
    }
    if lossless:
        _, exact = at("float64", settings, loop)
        row["gradient_farthest"] = farthest(exact, reference("float64", settings)[1])
        good = row["gradient_farthest"] <= CLOSE
    else:
        row["gradient_one_less_cosine"] = one_less_cosine(gradient, plain)
        good = row["gradient_one_less_cosine"] <= ALIKE
    return row | {"good": bool(good and relative <= NEAR)}


def summary(rows: dict[str, dict], settings: Settings) -> dict:
    return {
        "good": sum(row["good"] for row in rows.values()),
        "of": len(rows),
        "bad": [point for point, row in rows.items() if not row["good"]],
        "bit_equal_losses": sum(row["loss_bit_equal"] for row in rows.values()),
        "farthest_lossless_gradient": max(
            (r["gradient_farthest"] for r in rows.values() if r["lossless"]), default=None
        ),
    }


@functools.cache
def reference(dtype: str, settings: Settings):
    return at(dtype, settings, scanned(jaxmem.remat_policy(None)))


def at(dtype: str, settings: Settings, loop: Loop):
    """Returns the loss and the gradient at initialization, with dropout."""
    config = settings.config("gpt_nano", *SIZES)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        loss, state = make_loss(config, loop), init_state(config)
        shape = config.train.batch, config.train.sequence + 1
        tokens = np.random.default_rng(0).integers(0, 256, shape).astype(np.int32)
        key = jax.random.wrap_key_data(state.key)
        value, gradient = jax.jit(jax.value_and_grad(loss))(state.params, tokens, key)
        return np.asarray(value), [np.asarray(a) for a in jax.tree.leaves(gradient)]


def farthest(gradient, plain) -> float:
    """Returns the largest difference of an entry, relative to the largest entry of its array."""
    return max(float(np.abs(g - p).max() / np.abs(p).max()) for g, p in zip(gradient, plain))


def one_less_cosine(gradient, plain) -> float:
    g, p = (
        np.concatenate([a.ravel().astype(np.float64) for a in arrays])
        for arrays in (gradient, plain)
    )
    return float(1 - g @ p / np.sqrt((g @ g) * (p @ p)))

"""Is training under a plan the same training? Loss and gradient of gpt_nano, both dropouts on,
under plans of every kind.

    python -m benchmarks.exactness

Plans: one action for every tag, and random mixtures of all five. The float32 loss must be that of
no plan bit for bit, since no action changes the forward; in bfloat16, where XLA rounds as it fuses,
within 1e-3. Under plans of keep, recompute and offload the float64 gradient must be that of no plan
to a relative 1e-12 of each parameter's largest entry. On a CPU an offload moves nothing, but runs
the same program.
"""

import random

import jax
import numpy as np

import jaxmem
from benchmarks.shared.assignments import every, show
from benchmarks.shared.baselines import naive, own_codec
from benchmarks.shared.case import local_profile, nano
from benchmarks.shared.results import Report
from experiments.command.load import load
from experiments.data import text as data
from experiments.models.loops import scanned
from experiments.steps.step import init_state, make_loss
from jaxmem._core.actions import KEEP, OFFLOAD, RECOMPUTE, Action, Actions, Choice
from jaxmem._core.assignment import Assignment

MIXED, LOSSLESS = 12, 8
DROPOUT = ("model.attention_dropout=0.1",)
BFLOAT16 = ("model.dtype=bfloat16",)
FLOAT64 = ("model.dtype=float64", "train.batch=2")


def plans(profile) -> dict[str, Actions]:
    """By name; those that only keep, recompute and offload have a name that ends in "lossless"."""
    rng = random.Random(0)
    offloaded = lambda tag: Choice(Action.COMPRESS_OFFLOAD, own_codec(tag).codec)
    exact = KEEP, RECOMPUTE, OFFLOAD
    ways = {
        "keep lossless": lambda _: KEEP,
        "recompute lossless": lambda _: RECOMPUTE,
        "offload lossless": lambda _: OFFLOAD,
        "compress": own_codec,
        "compress_offload": offloaded,
        "compress naive": naive,
    }
    ways |= {f"random {i} lossless": lambda _: rng.choice(exact) for i in range(LOSSLESS)}
    any_ = lambda tag: rng.choice((*exact, own_codec(tag), offloaded(tag)))
    ways |= {f"random {i}": any_ for i in range(MIXED)}
    return {name: every(profile, choose) for name, choose in ways.items()}


def loss_and_gradient(overrides, actions: Actions | None):
    """On real text, at initialization, with the dropout of the first step."""
    config = load("gpt_nano", overrides)
    loss = make_loss(
        config, scanned(jaxmem.remat_policy(None if actions is None else Assignment(actions)))
    )
    state, t = init_state(config), config.train
    tokens = data.sample(data.read(None, t.sequence).train, 0, 1, t.batch, t.sequence)
    key = jax.random.wrap_key_data(state.key)
    value, gradient = jax.jit(jax.value_and_grad(loss))(state.params, tokens, key)
    return np.asarray(value), jax.tree.map(np.asarray, gradient)


def farthest(gradient, reference) -> float:
    """Largest difference of an entry, relative to the largest entry of its array."""
    distance = lambda g, r: float(np.abs(g - r).max() / np.abs(r).max())
    return max(jax.tree.leaves(jax.tree.map(distance, gradient, reference)))


def losses(report: Report, label: str, overrides, chosen: dict[str, Actions]) -> None:
    reference, _ = loss_and_gradient(DROPOUT + overrides, None)
    for name, actions in chosen.items():
        value, _ = loss_and_gradient(DROPOUT + overrides, actions)
        same, apart = bool(value == reference), abs(float(value) / float(reference) - 1)
        row = {"loss": float(value), "bit_equal": same, "relative": apart}
        report.add(f"{label} {name}", row)


def gradients(report: Report, chosen: dict[str, Actions]) -> None:
    jax.config.update("jax_enable_x64", True)
    _, reference = loss_and_gradient(DROPOUT + FLOAT64, None)
    for name, actions in chosen.items():
        if name.endswith("lossless"):
            _, gradient = loss_and_gradient(DROPOUT + FLOAT64, actions)
            report.add(f"float64 {name}", {"farthest": farthest(gradient, reference)})


def summary(report: Report) -> dict:
    of = lambda label, key: [r[key] for r in report.under(label).values()]
    equal = of("float32", "bit_equal")
    return {
        "plans": len(equal),
        "float32 losses bit-equal": f"{sum(equal)} of {len(equal)}",
        "bfloat16 loss, farthest (target 1e-3)": max(of("bfloat16", "relative")),
        "float64 gradient, farthest (target 1e-12)": max(of("float64", "farthest")),
    }


def main() -> None:
    report, chosen = Report("exactness"), plans(local_profile(nano()))
    losses(report, "float32", (), chosen)
    losses(report, "bfloat16", BFLOAT16, chosen)
    gradients(report, chosen)
    actions = {name: show(actions) for name, actions in chosen.items()}
    report.summarise(summary(report) | {"actions": actions})


if __name__ == "__main__":
    main()

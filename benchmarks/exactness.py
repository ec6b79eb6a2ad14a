"""Is training under a plan the same training, and what does compression cost in quality? gpt_nano
on this CPU.

    python -m benchmarks.exactness [RESULT ...]

`exactness`: loss and gradient, both dropouts on, under one action for every tag, and under random
mixtures of all five. The float32 loss must be equal to the loss without a plan bit for bit, since
no action changes the forward; in bfloat16, where XLA rounds as it fuses, within 1e-3. Under plans
of keep, recompute and offload the float64 gradient must be equal to the gradient without a plan to
a relative 1e-12 of each parameter's largest entry. On a CPU an offload moves nothing, but runs the
same program.

`quality`: validation loss after training from each of three seeds: unplanned, under the config's
plan, with every tag compressed by the codec of its kind (Adacc 3.2), and with naive per-token INT4
instead. Then, on the unplanned model of the first seed, the gradient with one tag compressed
against the exact one, by the tag's own codec and by the naive one: 1 - cosine of the whole
gradient, as the mean over batches. Targets: within 0.5 % of the unplanned loss; own codecs nearer
than naive.

`outliers`: validation losses and gradients of a model with outlier channels. gpt_nano is too small
to have outlier channels, so they are injected as in `benchmarks.runs`: one channel in 64 of each
tag of kind linear, norm, gelu or residual is multiplied by 64, tagged, and divided by 64. Without a
codec, this changes no number. Grouped INT4 without separated outliers is trained too. Gradients are
compared layer by layer, with all tags compressed.
"""

import itertools
import random
import statistics

import jax
import numpy as np

import jaxmem
from benchmarks.runs import gains, tagged_by
from benchmarks.shared import assignments
from benchmarks.shared.assignments import every, kind_of, naive, own_codec, show
from benchmarks.shared.case import Case, nano, on, trained
from benchmarks.shared.results import Benchmark, Report, measure
from benchmarks.shared.steps import compile_planned
from benchmarks.shared.timing import cache_compiles, first_batch
from experiments.config.text import Config
from experiments.data.text import Text
from experiments.gpu_check.parts.correctness import farthest, one_less_cosine
from experiments.models.loops import scanned
from experiments.running.planning import new_plan
from experiments.running.policies import without_outliers
from experiments.running.text import TEXT, evaluate
from experiments.steps.step import init_state, make_loss
from jaxmem._core.actions import KEEP, OFFLOAD, RECOMPUTE, Action, Actions, Choice
from jaxmem._core.assignment import Assignment
from jaxmem._core.profile import Profile

# -- exactness

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


def loss_under(config: Config, actions: Actions | None):
    """The loss with its layers under a plan; None is no plan."""
    plan = None if actions is None else Assignment(actions)
    return make_loss(config, scanned(jaxmem.remat_policy(plan)))


def loss_and_gradient(overrides, actions: Actions | None):
    """On real text, at initialization, with the dropout of the first step."""
    config = nano(*DROPOUT, *overrides)
    both, state = jax.jit(jax.value_and_grad(loss_under(config, actions))), init_state(config)
    key = jax.random.wrap_key_data(state.key)
    value, gradient = both(state.params, first_batch(config), key)
    return np.asarray(value), [np.asarray(a) for a in jax.tree.leaves(gradient)]


def losses(report: Report, label: str, overrides, chosen: dict[str, Actions]) -> None:
    reference, _ = loss_and_gradient(overrides, None)
    for name, actions in chosen.items():
        value, _ = loss_and_gradient(overrides, actions)
        same, apart = bool(value == reference), abs(float(value) / float(reference) - 1)
        row = {"loss": float(value), "bit_equal": same, "relative": apart}
        report.add(f"{label} {name}", row | {"actions": show(actions)})


def exact_gradients(report: Report, chosen: dict[str, Actions]) -> None:
    with jax.enable_x64(True):
        _, reference = loss_and_gradient(FLOAT64, None)
        for name, actions in chosen.items():
            if name.endswith("lossless"):
                _, gradient = loss_and_gradient(FLOAT64, actions)
                report.add(f"float64 {name}", {"farthest": farthest(gradient, reference)})


def exactness(report: Report) -> None:
    chosen = plans(Case(nano(), on("local")).profile)
    losses(report, "float32", (), chosen)
    losses(report, "bfloat16", BFLOAT16, chosen)
    exact_gradients(report, chosen)


def of_exactness(report: Report) -> dict:
    of = lambda label, key: [r[key] for r in report.under(label).values()]
    equal = of("float32", "bit_equal")
    return {
        "plans": len(equal),
        "float32 losses bit-equal": f"{sum(equal)} of {len(equal)}",
        "bfloat16 loss, farthest (target 1e-3)": max(of("bfloat16", "relative")),
        "float64 gradient, farthest (target 1e-12)": max(of("float64", "farthest")),
    }


# -- quality

STEPS, SEEDS, BATCHES = 150, 3, 4
CODECS = {"own": own_codec, "naive": naive}


def variants(profile: Profile) -> dict[str, Actions]:
    return {
        "unplanned": profile.everything_kept,
        "own_codecs": every(profile, own_codec),
        "naive": every(profile, naive),
    }


def config_of(seed: int, *overrides: str) -> Config:
    return nano(f"train.steps={STEPS}", f"train.seed={seed}", *overrides)


def train(text: Text, actions: Actions, seed: int):
    """The trained parameters and what is reported of them."""
    config = config_of(seed)
    state, metrics = trained(TEXT, config, text, compile_planned(config, actions))
    longer = config_of(seed, f"train.eval_batches={2 * config.train.eval_batches}")
    return state.params, {
        **evaluate(longer, state, text),
        "train_loss": float(metrics[-1]["loss"]),
        "actions": {t: str(c) for tags in actions.values() for t, c in tags.items()},
    }


def training(report: Report, text: Text, chosen: dict[str, Actions]) -> dict:
    """Every variant from every seed, seed by seed; the parameters of the first, unplanned."""
    params: dict = {}
    for seed, (name, actions) in itertools.product(range(SEEDS), chosen.items()):
        key, first = f"train/{name}/{seed}", name == "unplanned" and seed == 0
        if first or not report.has(key):
            found, result = train(text, actions, seed)
            params = found if first else params
            report.add(key, result)
    return params


def gradients(report: Report, text: Text, profile: Profile, params: dict) -> None:
    """1 - cosine of the gradient with one tag compressed and the exact one, by tag and codec."""

    def gradient(actions: Actions) -> list[list[jax.Array]]:
        return [jax.tree.leaves(g) for g in gradients_under(actions, text, params)]

    def compressed(block, tag, which: str) -> dict:
        choice = CODECS[which](tag)
        got = gradient(keep | {block.name: keep[block.name] | {tag.name: choice}})
        errors = [one_less_cosine(g, e) for g, e in zip(got, exact)]
        return {"codec": choice.codec, "one_less_cosine": errors}

    keep = assignments.keep_tags(profile)
    exact = gradient(keep)
    tags = ((block, tag) for block in profile.blocks for tag in block.tags if tag.dtype != "bool")
    for (block, tag), which in itertools.product(tags, CODECS):
        report.once(f"gradient/{tag.kind}/{tag.name}/{which}", compressed, block, tag, which)


def gradients_under(actions: Actions, text: Text, params: dict) -> list:
    """The gradients of `BATCHES` batches under a plan."""
    config = config_of(0)
    compiled = jax.jit(jax.grad(loss_under(config, actions)))
    return [compiled(params, TEXT.batch(config, text, 10**6 + i)) for i in range(BATCHES)]


def of_training(report: Report) -> dict:
    """By variant: by what share the validation loss differs from that without a plan."""
    rows = report.under("train/")
    loss = lambda name, seed: rows[f"{name}/{seed}"]["val_loss"]
    more = {
        name: [loss(name, seed) / loss("unplanned", seed) - 1 for seed in range(SEEDS)]
        for name in dict.fromkeys(key.partition("/")[0] for key in rows)
    }
    return {n: {"relative_difference": statistics.mean(m), "by_seed": m} for n, m in more.items()}


def of_gradients(report: Report) -> dict:
    """By kind of tensor: 1 - cosine with each codec, as a mean over tags and batches."""
    rows = [(key.split("/"), row) for key, row in report.under("gradient/").items()]
    errors = lambda *of: [e for (k, _, w), r in rows if (k, w) == of for e in r["one_less_cosine"]]
    return {
        kind: {which: statistics.mean(errors(kind, which)) for which in CODECS}
        for kind in dict.fromkeys(kind for (kind, *_), _ in rows)
    }


def quality(report: Report) -> None:
    cache_compiles()
    text, profile = TEXT.read(config_of(0)), Case(config_of(0), on("local")).profile
    chosen = variants(profile) | {"plan": new_plan(config_of(0)).actions}
    gradients(report, text, profile, training(report, text, chosen))


def of_quality(report: Report) -> dict:
    return {
        "validation_loss": of_training(report),
        "gradient_one_less_cosine_by_kind": of_gradients(report),
    }


# -- outliers

ONE_IN = 64  # channels


def by_layer(found: list, exact: list) -> list[list[float]]:
    """1 - cosine of two gradients of the layers' parameters: of each layer, for each batch."""
    stacks = lambda trees: [jax.tree.leaves(tree["blocks"]) for tree in trees]
    error = lambda i, a, b: one_less_cosine([x[i] for x in a], [x[i] for x in b])
    pairs = list(zip(stacks(found), stacks(exact)))
    return [[error(i, *pair) for pair in pairs] for i in range(config_of(0).model.layers)]


def outliers(report: Report) -> None:
    cache_compiles()
    config = config_of(0)
    text, profile = TEXT.read(config), Case(config, on("local")).profile
    grouped = lambda tag: Choice(Action.COMPRESS, without_outliers(kind_of(tag)))
    chosen = variants(profile) | {"grouped": every(profile, grouped)}
    with tagged_by(gains(config, True, ONE_IN)):
        params = training(report, text, chosen)
        exact = gradients_under(assignments.keep_tags(profile), text, params)
        for name, actions in chosen.items():
            found = gradients_under(actions, text, params)
            report.add(f"gradient/{name}", by_layer(found, exact))


def of_outliers(report: Report) -> dict:
    means = lambda layers: [statistics.mean(errors) for errors in layers]
    by_codec = {name: means(layers) for name, layers in report.under("gradient/").items()}
    return {
        "validation_loss": of_training(report),
        "gradient_one_less_cosine_by_layer": by_codec,
    }


RESULTS = {
    "exactness": Benchmark(run=exactness, summary=of_exactness),
    "quality": Benchmark(run=quality, summary=of_quality),
    "outliers": Benchmark(run=outliers, summary=of_outliers),
}

if __name__ == "__main__":
    measure("exactness", RESULTS)

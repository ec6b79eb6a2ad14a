"""What compression costs in quality: gpt_nano trained with and without it, and gradients by kind of
tensor.

Validation loss after training from each of three seeds: unplanned, under the config's plan, with
every tag compressed by the codec of its kind (Adacc 3.2), and with naive per-token INT4 instead.
Then, on the unplanned model of the first seed, the gradient with one tag compressed against the
exact one, by the tag's own codec and by the naive one: 1 - cosine of the whole gradient, as the
mean over batches. Targets: within 0.5 % of the unplanned loss; own codecs nearer than naive.

The file is written as results come, and what stands in it is not run again.

Command:  python -m benchmarks.quality [--out FILE] [--steps N] [--seeds N] [--batches N]
"""

import math
import statistics
import time

import jax
import numpy as np

import jaxmem
from benchmarks.shared.baselines import naive, of_choices, own_codec
from benchmarks.shared.case import compile_step, local_profile, nano
from benchmarks.shared.results import Report
from benchmarks.shared.timing import cache_compiles
from experiments.config.text import Config
from experiments.data import text as data
from experiments.errors import DivergedError
from experiments.models.loops import scanned
from experiments.running.planning import new_plan
from experiments.running.shown import Progress
from experiments.running.text import TEXT, evaluate
from experiments.steps.step import make_loss
from jaxmem._core.actions import KEEP, Actions
from jaxmem._core.assignment import Assignment
from jaxmem._core.profile import Profile

TARGET = 0.005


def variants(config: Config, profile: Profile) -> dict[str, Actions]:
    plan = new_plan(config)
    return {
        "unplanned": of_choices("", profile, lambda _: KEEP, rest=True).actions,
        "plan": plan.actions,
        "own_codecs": of_choices("", profile, own_codec).actions,
        "naive": of_choices("", profile, naive).actions,
    }


def train(config: Config, step, text: data.Text, batches: int):
    """The trained parameters and what is reported of them."""
    t, rows = config.train, []
    started = time.perf_counter()
    with Progress(t.steps, 50, TEXT.unit, TEXT.count(config)) as progress:
        state = TEXT.first_state(config, None)
        for number in range(1, t.steps + 1):
            state, metrics = step.step(state, TEXT.batch(config, text, number))
            found = {name: float(value) for name, value in metrics.items() if not np.ndim(value)}
            rows.append({"step": number} | found)
            progress(number, found["loss"])
            if not math.isfinite(found["loss"]):
                raise DivergedError(f"step {number}: the loss is {found['loss']}; {TEXT.remedy}")
    longer = config.model_copy(update={"train": t.model_copy(update={"eval_batches": batches})})
    return state.params, {
        **evaluate(longer, state, text),
        "train_loss": rows[-1],
        "seconds": time.perf_counter() - started,
    }


def training(
    config: Config, seeds: int, chosen: dict[str, Actions], text: data.Text, report: Report
) -> dict:
    """Every variant from every seed, seed by seed; the parameters of the first, unplanned."""
    steps, params = {}, {}
    for seed in range(seeds):
        seeded = config.model_copy(update={"train": config.train.model_copy(update={"seed": seed})})
        for name, actions in chosen.items():
            key, first = f"train/{name}/{seed}", name == "unplanned" and seed == 0
            if report.has(key) and not first:
                continue
            if name not in steps:
                steps[name] = compile_step(config, jaxmem.remat_policy(Assignment(actions)))
            trained, result = train(seeded, steps[name], text, 2 * config.train.eval_batches)
            params = trained if first else params
            report.add(
                key,
                result
                | {"actions": {t: str(c) for tags in actions.values() for t, c in tags.items()}},
            )
    return params


def gradients(
    config: Config, profile: Profile, params: dict, text: data.Text, batches: int, report: Report
) -> None:
    """1 - cosine of the gradient with one tag compressed and the exact one, by tag and codec."""
    t = config.train
    tokens = [
        data.sample(text.train, t.seed, 10**6 + i, t.batch, t.sequence) for i in range(batches)
    ]

    def gradient(actions: Actions) -> list[np.ndarray]:
        compiled = jax.jit(
            jax.grad(make_loss(config, scanned(jaxmem.remat_policy(Assignment(actions)))))
        )
        leaves = [jax.tree.leaves(compiled(params, one)) for one in tokens]
        return [
            np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in one]) for one in leaves
        ]

    keep = of_choices("", profile, lambda _: KEEP).actions
    exact = gradient(keep)
    for block in profile.blocks:
        for tag in (t for t in block.tags if t.dtype != "bool"):
            for which, choose in (("own", own_codec), ("naive", naive)):
                key = f"gradient/{tag.kind}/{tag.name}/{which}"
                if not report.has(key):
                    got = gradient(keep | {block.name: keep[block.name] | {tag.name: choose(tag)}})
                    errors = [1 - g @ e / np.sqrt((g @ g) * (e @ e)) for g, e in zip(got, exact)]
                    report.add(
                        key,
                        {"codec": choose(tag).codec, "one_less_cosine": [float(e) for e in errors]},
                    )


def summary(results: dict[str, dict]) -> dict:
    parted = [(key.split("/"), value) for key, value in results.items()]
    val = {
        (name, seed): v["val_loss"]
        for (what, name, *rest), v in parted
        if what == "train"
        for seed in rest
    }
    seeds = [seed for name, seed in val if name == "unplanned"]
    losses = {}
    for name in dict.fromkeys(name for name, _ in val):
        more = [val[name, s] / val["unplanned", s] - 1 for s in seeds if (name, s) in val]
        if more:
            mean = statistics.mean(more)
            losses[name] = {
                "relative_difference": mean,
                "by_seed": more,
                "within_target": abs(mean) <= TARGET,
            }
    errors: dict[str, dict[str, list[float]]] = {}
    for (what, *rest), value in parted:
        if what == "gradient":
            kind, _, which = rest
            errors.setdefault(kind, {}).setdefault(which, []).extend(value["one_less_cosine"])
    means = {
        kind: {which: statistics.mean(e) for which, e in found.items()}
        for kind, found in errors.items()
    }
    kinds = {
        k: m | {"own_is_nearer": m["own"] < m["naive"]} for k, m in means.items() if len(m) == 2
    }
    return {"target": TARGET, "validation_loss": losses, "gradient_one_less_cosine_by_kind": kinds}


def main() -> None:
    report = Report("quality", steps=150, seeds=3, batches=4)
    chosen = report.chosen
    cache_compiles()
    config = nano(f"train.steps={chosen['steps']}")
    text = data.read(config.data.path, config.train.sequence)
    profile = local_profile(config)
    params = training(config, chosen["seeds"], variants(config, profile), text, report)
    gradients(config, profile, params, text, chosen["batches"], report)
    found = summary(report.results)
    report.summarise(found)
    for name, one in found["validation_loss"].items():
        print(
            f"{name:12} {one['relative_difference']:+.3%} of the unplanned loss, by seed"
            f" {one['by_seed']}"
        )
    for kind, one in found["gradient_one_less_cosine_by_kind"].items():
        print(f"{kind:10} 1 - cosine: own {one['own']:.3g}, naive {one['naive']:.3g}")


if __name__ == "__main__":
    main()

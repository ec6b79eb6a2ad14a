"""AdamA against other ways to sum gradients and against other optimizers: device bytes, losses, its
second moment, and step time.

    python -m benchmarks.adama [RESULT ...]

Steps of the first four results are compiled without hardware, and do not run. Steps of the others
run on this CPU.

`adama_bytes`: gradient bytes of gpt_345m's step on an H200, batch 8 in 8 microbatches, by how the
microbatches become one step: optax.MultiSteps, gradients added in a scan over microbatches, each
layer's gradients added in the backward, AdamA on whole gradients, AdamA released. Gradient bytes
are the step's temporary bytes minus the temporary bytes of a step that differentiates the same
microbatches by the embedded input alone. MultiSteps holds its sum among its arguments, and the row
ratio holds 8 bytes a row there; the summary lists both. Layers keep nothing, so that all steps hold
the same activations.

`adama_bert_4b`: BERT-4B, minibatch 64 in 8 microbatches, AdamA against accumulation in place
(AdamA, Fig. 6; M11), on one H200, and on eight with divided moments (ZeRO-1). Parameters, moments
and gradient sums are float32, computation is bfloat16. AdamA can save at most the gradient sum, 4
bytes a parameter. The paper saves 23.2 % on one device; on eight, 20.1 GB against divided moments
alone, 7.6 GB against divided moments and gradients.

`adama_table2`: BERT-Large, 8 sequences of 128, on an H200: Adam, Adafactor, SM3 and AdamA (AdamA,
Table 2; M10). States are float32, computation is bfloat16, everything is kept. AdamA takes the 8
sequences as 8 microbatches; the others would need a gradient buffer, and take them at once. The
paper, in GB on one GPU: Adam 6.15, Adafactor 4.83, SM3 4.90, AdamA 4.18.

`adama_largest`: the largest BERT that eight devices train, minibatch 256 in 8 microbatches, AdamA
against accumulation (AdamA, Table 3; M12), for eight H200s capped to 16, 32 and 80 GB (no compiler
here supports a V100 any more). Depth and width are interpolated in GPT-3's table; sequence 128; all
layers are recomputed. "whole": float32 states on every device, 12 bytes a parameter and 4 more for
the gradient's sum. "states divided": float32 parameters and moments divided over the devices, with
a bfloat16 copy of the parameters on each, 3.5 bytes a parameter and 4 more for the sum. The bound
is the cap divided by these bytes; `of the bound` is the largest model found over the bound. Sizes
are found by compiling; widths are multiples of 16, so that a model is 1 to 2 % larger than the
next.

`adama_convergence`: final losses of AdamA with 2, 4 and 8 microbatches against Adam's, over seeds,
with the paper's second moment and with the row ratio (AdamA, Fig. 2 and 3; M6, M7). A GPT on two
texts and a BERT, two layers of width 64, 250 steps of 32 sequences of 32 bytes; a ResNet of 14
layers on scikit-learn's digits, 200 steps of 64 images. The texts are Python's standard library,
and Python's C headers. Beta2 is 0.95 and 0.999, the rate is Adam's. Adam takes the mean of the same
microbatches: in the GPT and the BERT that is the batch's gradient, so Adam takes the whole batch;
in the ResNet, whose batch norm sees a microbatch, gradients are added. AdamA's steps are released
in the GPT and the BERT; the ResNet uses the unreleased transformation. The spread of seeds is
Adam's largest final loss minus its smallest; a difference is of means.

`adama_ratio`: how far AdamA's second moment is from Adam's, the mean of sqrt(v) / sqrt(v') (AdamA,
Fig. 4; M8). The same ResNet with N = 2, 4 and 8 microbatches, with the paper's second moment and
with the row ratio. v gathers the squares of the microbatches' gradients g_i / N, and is multiplied
by the ratio of its row if there is one; v' gathers the square of their sum, both along the same run
and corrected for their start. Each step has the mean of sqrt(v) / sqrt(v') over all values, the
median, and the signal-to-noise ratio of the microbatches' gradients: |mean|² over the sum of
variances, less 1 / N, which is the noise in the mean itself; where noise rules it is 0 and may come
out below. An array of ratio s everywhere has sqrt(v) / sqrt(v') of sqrt((1 + s) / (1 + N s)): 1
where noise rules. In the first steps, gradients of blocks that start as the identity are nearly 0,
and the mean is far above 1.

`adama_time`: step time of a GPT on this CPU by how its 8 microbatches become one step: AdamA
against accumulation in place. gpt_nano, and the same at width 512, where the states' traffic weighs
more; layers are recomputed, all in jaxmem.stack. Gradients are clipped by value unless the row says
otherwise. Steps run in turns, in every round in another order; ratios are to "in_place", paired by
round: median and quartiles, by the clock and by all cores' work.
"""

import bisect
import dataclasses
import itertools
import math
import statistics
import sysconfig
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.shared.case import nano, trained
from benchmarks.shared.devices import PLAN, accumulation, adama, compiled, compiled_on, count
from benchmarks.shared.results import Benchmark, Report, measure
from benchmarks.shared.searches import replacing
from benchmarks.shared.steps import compile_planned
from benchmarks.shared.timing import cache_compiles, clock_and_cores, first_batch, in_turns
from experiments.command.load import load
from experiments.config.images import ImageConfig
from experiments.config.text import Config
from experiments.models import registry as models
from experiments.models.loops import stacked
from experiments.running.images import IMAGES
from experiments.running.text import TEXT, evaluate
from experiments.steps import accumulate
from experiments.steps import step as steps
from experiments.steps.accumulate import microbatches
from experiments.steps.images import make_step as image_step
from experiments.steps.step import abstract, first_state, make_step
from jaxmem._optim.adama import ratio
from jaxmem._target.compiled.compiled import Compiled

TARGET = "h200"
RELEASED, ROW = "accumulation=released", "second_moment=row"


def microbatched(name: str, *optimizer: str, more=()) -> Config:
    """A config with 8 microbatches, and settings of its optimizer."""
    own = (f"optimizer.{setting}" for setting in ("clip=value", *optimizer))
    return load(name, ["model.loop=stack", "train.microbatches=8", *own, *more])


def sizes(found: Compiled) -> dict[str, int]:
    names = {"bytes": "total_bytes", "temp_bytes": "temp_bytes", "argument_bytes": "argument_bytes"}
    return {key: getattr(found, name) for key, name in names.items()}


def sizes_of(step, arguments: tuple, donated: int | tuple = 0) -> dict[str, int]:
    """Of a step on one device."""
    return sizes(compiled(TARGET, jax.jit(step, donate_argnums=donated).trace(*arguments)))


# -- adama_bytes

INPUT = "by the input alone"
SUMMED = {  # settings of the optimizer
    "optax.MultiSteps": ("accumulation=multi_steps",),
    "accumulation in a scan": ("accumulation=scan",),
    "accumulation in place, layer by layer": ("accumulation=in_place",),
    "AdamA, whole gradients": ("accumulation=adama",),
    "AdamA, released": (RELEASED,),
    "AdamA, released, row ratio": (RELEASED, ROW),
    INPUT: ("accumulation=scan",),
}


def gradients_config(way: str) -> Config:
    return microbatched("gpt_345m", *SUMMED[way])


def by_input(config: Config):
    """step(state, batch): the same forward and backward, without a parameter's gradient."""
    split, loop = models.split(config), stacked(PLAN)

    def step(state, batch):
        outer = {k: v for k, v in state.params.items() if k != "blocks"}
        after = lambda x, key: loop(split.layer, state.params["blocks"], x, key)
        loss = lambda x, part, key: split.head(outer, after(x, key), part)

        def one(total, indexed):
            index, part = indexed
            key = jax.random.fold_in(jax.random.wrap_key_data(state.key), index)
            value, d_x = jax.value_and_grad(loss)(split.embed(outer, part), part, key)
            return total + value + d_x.astype(jnp.float32).sum(), None

        return jax.lax.scan(one, jnp.zeros(()), microbatches(batch, config.train.microbatches))[0]

    return step


def gradients(way: str) -> dict[str, int]:
    config = gradients_config(way)
    if way == INPUT:
        return sizes_of(by_input(config), abstract(config), donated=())
    return sizes_of(make_step(config, PLAN), abstract(config))


def of_gradients(report: Report) -> dict:
    rows, params = report.results, abstract(gradients_config(INPUT))[0].params
    ways = [way for way in SUMMED if way != INPUT]
    found = {way: rows[way]["temp_bytes"] - rows[INPUT]["temp_bytes"] for way in ways}
    released = rows["AdamA, released"]["argument_bytes"]
    held = {way: rows[way]["argument_bytes"] - released for way in ways}
    return {
        "gradient bytes": found,
        "and among MultiSteps' arguments": held["optax.MultiSteps"],
        "and among the row ratio's": held["AdamA, released, row ratio"],
        # A ratio for each index of a matrix's axes but its last; for a vector one, in each layer.
        "rows": sum(math.prod(a.shape[:-1]) for a in jax.tree.leaves(params)),
    }


# -- adama_bert_4b

BERT_4B = load("bert_4b", ["optimizer.clip=none"])
ALSO_GRADIENTS = "moments", None, "divided"
DIVIDED = {  # devices, what makes the step, and its arguments
    "accumulation, 1": (1, accumulation, ("nothing",)),
    "AdamA, 1": (1, adama, ("nothing",)),
    "accumulation, moments divided, 8": (8, accumulation, ("moments",)),
    "accumulation, moments and gradients divided, 8": (8, accumulation, ALSO_GRADIENTS),
    "AdamA, moments divided, 8": (8, adama, ("moments",)),
}
# The steps with accumulation and with AdamA whose difference is the saving.
SAVED = {
    "1": ("accumulation, 1", "AdamA, 1"),
    "8": ("accumulation, moments divided, 8", "AdamA, moments divided, 8"),
    "8, against divided gradients":
        ("accumulation, moments and gradients divided, 8", "AdamA, moments divided, 8"),
}  # fmt: skip


def divided(name: str) -> dict[str, int]:
    devices, make, arguments = DIVIDED[name]
    return sizes(compiled_on(BERT_4B, devices, make(BERT_4B, devices, *arguments)))


def of_divided(report: Report) -> dict:
    size, told = count(BERT_4B), {}
    for name, pair in SAVED.items():
        before, after = (report[key]["bytes"] for key in pair)
        saved = before - after
        own = {"saved bytes": saved, "saved": saved / before, "of the bound": saved / (4 * size)}
        told |= {name: own, f"bound, {name}": 4 * size / before}
    return {"parameters": size} | told


# -- adama_table2

OPTIMIZERS = {
    "Adam": optax.adam(1e-4),
    "Adafactor": optax.adafactor(1e-4),
    "Adafactor, with momentum": optax.adafactor(1e-4, momentum=0.9),
    "SM3": optax.sm3(1e-4),
}


def optimizer(name: str) -> dict[str, int]:
    """Of a step under one of `OPTIMIZERS` in the place of the config's, or under AdamA."""
    own = ["train.microbatches=1", "optimizer.accumulation=scan"]
    if name not in OPTIMIZERS:
        own = [f"train.microbatches={name.removeprefix('AdamA, N=')}"]
    config = load("bert_large", ["train.batch=8", "optimizer.clip=none", *own])
    instead = "optimizer", lambda config: OPTIMIZERS[name]
    with replacing((accumulate, *instead), (steps, *instead)):
        return sizes_of(make_step(config), abstract(config))


def of_optimizers(report: Report) -> dict:
    rows = {name: row["bytes"] for name, row in report.results.items()}
    best = min(rows[name] for name in OPTIMIZERS)
    return {"bytes": rows, "AdamA, N=8, over the least of the others": rows["AdamA, N=8"] / best}


# -- adama_largest

DEVICES = 8
CAPS = {f"{size} GB": size * 10**9 for size in (16, 32, 80)}
LARGEST = {  # what makes the step, its arguments, and bytes of a parameter
    "accumulation, whole": (accumulation, ("nothing",), 16.0),
    "AdamA, whole": (adama, ("nothing",), 12.0),
    "accumulation, states divided": (accumulation, ("states", "bfloat16"), 7.5),
    "AdamA, states divided": (adama, ("states", "bfloat16"), 3.5),
}
GPT3 = ((125e6, 12, 768), (350e6, 24, 1024), (760e6, 24, 1536), (1.3e9, 24, 2048),
        (2.7e9, 32, 2560), (6.7e9, 32, 4096),
        (13e9, 40, 5120), (175e9, 96, 12288))  # fmt: skip
HEADS, VOCAB, STEP = 16, 30522, 16  # STEP: of the widths between the table's rows


def sized(parameters: float) -> Config:
    """A BERT of about so many parameters: depth by GPT-3's table, and the width that gives them."""
    known, depths, _ = np.log(np.transpose(GPT3))
    layers = round(math.exp(np.interp(math.log(parameters), known, depths)))
    count_of = lambda width: 12 * layers * width**2 + VOCAB * width
    width = max(w for w in range(256, 16384, STEP) if count_of(w) <= parameters)
    shape = f"model.layers={layers}", f"model.width={width}", f"model.heads={HEADS}"
    return load("bert_4b", ["train.batch=256", "optimizer.clip=none", *shape])


def largest(way: str, memory: str) -> dict:
    """By bisection among sizes that differ by half a percent of the bound."""
    make, arguments, each = LARGEST[way]
    cap, tried = CAPS[memory], {}
    bound = cap / each

    def is_over(parameters: float) -> bool:
        config = sized(parameters)
        total = compiled_on(config, DEVICES, make(config, DEVICES, *arguments)).total_bytes
        shape = {"layers": config.model.layers, "width": config.model.width}
        tried[count(config)] = {"bytes": total} | shape
        return total > cap

    bisect.bisect([bound * share / 200 for share in range(100, 201)], False, key=is_over)
    size = max((size for size, row in tried.items() if row["bytes"] <= cap), default=None)
    found = {"parameters": size, "tried": tried}
    return found if size is None else found | {"of the bound": size / bound} | tried[size]


def of_largest(report: Report) -> dict:
    return {
        key: {"billion": row["parameters"] / 1e9, "of the bound": row["of the bound"]}
        for key, row in report.results.items()
    }


# -- adama_convergence

SEEDS, COUNTS, BETAS = (0, 1, 2), (2, 4, 8), (0.95, 0.999)
MOMENTS = ("squares", "row")
SMALL = (
    "model.layers=2", "model.width=64", "model.heads=4", "model.dropout=0.0",
    "model.attention_dropout=0.0", "plan.budget=none", "train.steps=250", "train.batch=32",
    "train.sequence=32", "train.loss_chunk=32", "optimizer.clip=none",
)  # fmt: skip
FOLDS = f"optimizer.{RELEASED}", "model.loop=stack"
SMALL_RESNET = "model.depth=14", "model.width=8", "train.steps=200", "train.batch=64"
HEADERS = sysconfig.get_path("include")
MODELS = {
    "GPT": (),
    "GPT, C headers": (f"data.path={HEADERS}",),
    "BERT": ("model.kind=bert", "model.vocab=257"),
    "ResNet": None,
}
CURVE = 20  # steps to a point


def resnet_of(way: str, n: int, *overrides: str) -> ImageConfig:
    """A ResNet of 14 layers on scikit-learn's digits, under Adam or AdamA."""
    how = "accumulation=scan" if way == "Adam" else f"second_moment={way}"
    own = f"train.microbatches={n}", f"optimizer.{how}"
    return load("resnet50_digits", [*SMALL_RESNET, *own, *overrides], ImageConfig)


def config_of(model: str, beta2: str, way: str, n: int, seed: str, *more: str):
    common = f"optimizer.{beta2}".replace(" ", "="), f"train.{seed}".replace(" ", "="), *more
    if model == "ResNet":
        return resnet_of(way, n, *common)
    folded = f"train.microbatches={n}", f"optimizer.second_moment={way}", *FOLDS
    how = () if way == "Adam" else folded
    return nano(*SMALL, *MODELS[model], *common, *how)


def train(model: str, *case) -> dict:
    config: Any = config_of(model, *case)
    kind: Any = IMAGES if model == "ResNet" else TEXT
    score: Any = IMAGES.evaluate if model == "ResNet" else evaluate  # without a sample of text
    data = kind.read(config)
    state, metrics = trained(kind, config, data, kind.step(config, data).step)
    losses = [float(one["loss"]) for one in metrics]
    points = (losses[i : i + CURVE] for i in range(0, len(losses), CURVE))
    curve = [round(statistics.fmean(point), 4) for point in points]
    return {"final": score(config, state, data)["val_loss"], "curve": curve}


def ways(model: str) -> list[tuple[str, int]]:
    """Adam, and every other way with its number of microbatches."""
    adam = COUNTS if model == "ResNet" else (1,)
    return [*(("Adam", n) for n in adam), *itertools.product(MOMENTS, COUNTS)]


TRAINED = [
    (model, f"beta2 {beta}", way, n, f"seed {seed}")
    for seed, beta, model in itertools.product(SEEDS, BETAS, MODELS)
    for way, n in ways(model)
]


def cell(results: dict, model: str, beta: float, n: int) -> dict:
    """What a model's runs with a beta2 and a number of microbatches ended with, beside Adam's."""
    name = f"{model}, beta2 {beta}"
    finals = {
        way: [results[f"{name}, {way}, {count}, seed {seed}"]["final"] for seed in SEEDS]
        for way, count in ways(model)
        if count == n or (way == "Adam" and model != "ResNet")
    }
    adam = finals.pop("Adam")
    mean, spread = statistics.fmean(adam), max(adam) - min(adam)
    differences = {way: statistics.fmean(values) - mean for way, values in finals.items()}
    return {
        "Adam": mean,
        "spread": spread,
        "less Adam": differences,
        "within": {way: d <= spread for way, d in differences.items()},
        "row no worse than squares": differences["row"] - differences["squares"] <= spread,
    }


def of_convergence(report: Report) -> dict:
    return {
        f"{model}, beta2 {beta}, N={n}": cell(report.results, model, beta, n)
        for model, beta, n in itertools.product(MODELS, BETAS, COUNTS)
    }


# -- adama_ratio


def watched_step(config, adam):
    """step(state, Adam's moments, batch) -> (state, Adam's moments, the mean ratio, the median,
    signal-to-noise). `adam`: the config of Adam on added gradients.
    """
    train, by_adam = image_step(config), image_step(adam)
    b2, n = config.optimizer.beta2, config.train.microbatches

    def step(state, moments, batch):
        moments = by_adam(dataclasses.replace(state, moments=moments), batch)[0].moments
        state, metrics = train(state, batch)
        # both are divided by 1 - beta2^t, which cancels; an array that has seen no gradient has no
        # ratio
        other = jax.tree.leaves(optax.tree.get(moments, "nu"))
        pairs = zip(used(b2, n, state.moments), other, strict=True)
        ratios = [jnp.where(w > 0, jnp.sqrt(v / jnp.where(w > 0, w, 1)), jnp.nan) for v, w in pairs]
        values = jnp.concatenate([r.reshape(-1) for r in ratios])
        return state, moments, jnp.nanmean(values), jnp.nanmedian(values), metrics["snr"]

    return jax.jit(step, donate_argnums=(0, 1))


def used(b2: float, n: int, state) -> list:
    """The second moments that the update before this state was divided by."""
    nu = jax.tree.leaves(state.nu)
    if state.moments.square is None:
        return nu
    square = jax.tree.leaves(state.square)
    # With sums whose squares are the averages themselves the averages stay what they are.
    sums, given = [jnp.sqrt(s) for s in square], {"b2": b2, "done": state.count, "most": n}
    given |= {"like": nu, "axis_name": None, "stacked": [None] * len(nu)}
    _, scaled = ratio.scaled(nu, square, sums, **given)
    return scaled


def follow(way: str, microbatches: str) -> dict[str, list[float]]:
    n = int(microbatches.removeprefix("N="))
    config, adam = (resnet_of(how, n) for how in (way, "Adam"))
    data, state, rows = IMAGES.read(config), IMAGES.first_state(config, None), []
    moments, step = IMAGES.first_state(adam, None).moments, watched_step(config, adam)
    for number in range(1, config.train.steps + 1):
        state, moments, *found, snr = step(state, moments, IMAGES.batch(config, data, number))
        rows.append((*map(float, found), float(snr) - 1 / n))
    return dict(zip(("ratio", "median", "signal to noise"), map(list, zip(*rows))))


FOLLOWED = [(way, f"N={n}") for way in MOMENTS for n in COUNTS]


def of_ratio(report: Report) -> dict:
    last = lambda values: statistics.fmean(values[-50:])
    return {
        name: {
            "largest": max(row["ratio"]),
            "mean of the last 50 steps": last(row["ratio"]),
            "median of the last 50 steps": last(row["median"]),
        }
        for name, row in report.results.items()
    }


# -- adama_time

ROUNDS = 25
MICROBATCHED = {  # settings of the optimizer
    **{way: (f"accumulation={way}",) for way in ("scan", "in_place", "adama", "released")},
    "released, row ratio": (RELEASED, ROW),
    "released, row ratio, not clipped": (RELEASED, ROW, "clip=none"),
    "released, clipped by component": (RELEASED, "clip=component"),
    "released, clipped by global norm": (RELEASED, "clip=norm"),
}
SIZES = {
    "gpt_nano": (),
    "width 512": ("model.width=512", "train.sequence=64", "train.loss_chunk=64"),
}


def timed(report: Report, size: str) -> None:
    cache_compiles()
    of = lambda how: microbatched("gpt_nano", *how, more=SIZES[size])
    configs = {name: of(how) for name, how in MICROBATCHED.items()}
    planned = {name: compile_planned(config, {"block": {}}) for name, config in configs.items()}
    states = {name: first_state(config) for name, config in configs.items()}
    seconds = in_turns([planned], ROUNDS, states, first_batch(configs["in_place"]))
    for way in planned:
        report.add(f"{size}, {way}", clock_and_cores(seconds, way, "in_place"))


def of_time(report: Report) -> dict:
    cores = {name: row["cores"]["median"] for name, row in report.results.items()}
    return {"median of cores' work, to accumulation in place": cores}


RESULTS = {
    "adama_bytes": Benchmark(SUMMED, row=gradients, summary=of_gradients),
    "adama_bert_4b": Benchmark(DIVIDED, row=divided, summary=of_divided),
    "adama_table2": Benchmark(
        [*OPTIMIZERS, *(f"AdamA, N={n}" for n in (1, 2, 4, 8))],
        row=optimizer,
        summary=of_optimizers,
    ),
    "adama_largest": Benchmark(
        [(way, cap) for cap, way in itertools.product(CAPS, LARGEST)],
        row=largest,
        summary=of_largest,
    ),
    "adama_convergence": Benchmark(TRAINED, row=train, summary=of_convergence),
    "adama_ratio": Benchmark(FOLLOWED, row=follow, summary=of_ratio),
    "adama_time": Benchmark(SIZES, timed, of_time),
}

if __name__ == "__main__":
    measure("adama", RESULTS)

"""The largest batch within 32 GB, and throughput over the batch: plans against training without a
checkpoint, full recomputation and quantization of every tag (Adacc's Table 3 and Figures 1 and 5).

    python -m benchmarks.batches [RESULT ...]

Steps are compiled for an H200 without hardware, with a budget of 32 GB, the memory of Adacc's GPU.
The loss, the attention and the optimizer are equal in all ways. Sequences have 1024 tokens.

`max_batch`: the largest multiple of 4 that fits, by the bytes of XLA's buffer assignment and the
margin that plans leave. "lossless" is a plan that recomputes and offloads, "on the device" a plan
that recomputes alone, and "plan" a plan with all actions.

`throughput`: sequences a second by batch. Seconds are XLA's estimate of the compiled step, and its
waiting for host transfers by the compiled schedule. A plan has all actions.

`shares`: of the step without a checkpoint, the share of the bytes that are neither states nor
arguments, by batch; and of the step under full recomputation, the share of the seconds that are
recomputation.

`tensors`: what recomputing and compressing each tag of one layer costs (Adacc's Table 1), with
batch 8. Times are of the cost model, for an H200, compared with the layer that keeps every tag.
"""

import functools
import math
from typing import Any

import jax

from benchmarks.shared.assignments import every, keep_tags, own_codec
from benchmarks.shared.case import Case, Step, on
from benchmarks.shared.results import Benchmark, Report, known, measure
from jaxmem._core.actions import ALL, KEEP, LOSSLESS, RECOMPUTE, Action, Actions
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._planner.search.trial import Limits, Trial
from jaxmem._planner.sizes import within
from jaxmem._planner.solve.cost import evaluate

TARGET, BUDGET, MULTIPLE, MOST = "h200", 32 * 10**9, 4, 4096
CONFIGS = "gpt_117m", "gpt_345m"
FIXED = "no optimization", "full recomputation", "quantization"
PLANNED = {"lossless": LOSSLESS, "plan": ALL, "on the device": (Action.KEEP, Action.RECOMPUTE)}
BATCHES = {"gpt_117m": (8, 32, 64), "gpt_345m": (4, 16, 32)}


@functools.cache
def case(config: str, batch: int) -> Case:
    return Case(config, on(TARGET), [f"train.batch={batch}"])


@functools.cache
def fixed(config: str, way: str) -> Actions | None:
    """The actions of a way without a plan. None keeps everything."""
    if way == "no optimization":
        return None
    choose = own_codec if way == "quantization" else lambda _: RECOMPUTE
    return every(case(config, MULTIPLE).profile, choose)


@functools.cache
def compiled(config: str, way: str, batch: int) -> CompiledStep:
    one = case(config, batch)
    # Blocks and tags are equal at every batch: the profile of the least batch tells them.
    one.profile = case(config, MULTIPLE).profile
    return one.compile_buffers(fixed(config, way))[0]


def usable() -> int:
    """The bytes of the budget that a plan may use."""
    with on(TARGET) as backend:
        return Limits.on(backend, BUDGET, 0).usable_bytes


# -- max_batch


def batch_of(example: Any, size: int) -> Any:
    """The shapes of a batch of another size."""
    other = lambda a: jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype)
    return jax.tree.map(other, example)


def largest(config: str, way: str) -> dict[str, int]:
    """The largest batch, and its bytes."""
    if way in PLANNED:
        one = case(config, MULTIPLE)
        args = one.args[0], functools.partial(batch_of, one.args[1])
        sizes = range(MULTIPLE, MOST + 1, MULTIPLE)
        step = Step(one.build, args, one.backend)
        plan = step.plan(BUDGET, actions=PLANNED[way], batch="max", sizes=sizes)
        return {
            "batch": known(plan.batch),
            "bytes": plan.compiled_bytes,
            "host bytes": plan.host_bytes,
        }
    size = lambda i: MULTIPLE * (i + 1)
    bytes_of = lambda i: compiled(config, way, size(i)).total
    index = within(MOST // MULTIPLE, bytes_of, usable())
    return {"batch": size(index), "bytes": bytes_of(index), "host bytes": 0}


def of_batches(report: Report) -> dict[str, float]:
    """Each way's largest batch, divided by the largest batch of full recomputation."""
    most = {name: row["batch"] for name, row in report.results.items()}
    of = lambda name: most[f"{name.split(', ')[0]}, full recomputation"]
    return {name: batch / of(name) for name, batch in most.items()}


# -- throughput


def seconds(config: str, batch: int) -> dict[str, dict[str, float]]:
    """Of each way that fits: bytes, seconds of a step, and sequences a second."""
    one, rows = case(config, batch), {}
    plan = one.attempt(BUDGET, actions=PLANNED["plan"])[0]
    given = {way: fixed(config, way) for way in FIXED} | {"plan": known(plan).actions}
    for way, actions in given.items():
        (step,) = one.compile_buffers(actions)
        if step.total > usable():
            continue
        # Of a way that keeps everything, nothing is in host memory.
        cost = evaluate(one.profile, keep_tags(one.profile) if actions is None else actions)
        time = known(Trial(step, cost, step.total).xla_seconds)
        rows[way] = {"bytes": step.total, "seconds": time, "sequences a second": batch / time}
    return rows


def of_throughput(report: Report) -> dict[str, dict[str, list[float]]]:
    """The plan's throughput, divided by the throughput of each other way: least and greatest."""
    found = {}
    for config in CONFIGS:
        rows = report.under(f"{config}, ").values()
        found[config] = {}
        for way in FIXED:
            over = [r[way]["seconds"] / r["plan"]["seconds"] for r in rows if way in r]
            found[config][way] = [min(over), max(over)] if over else []
    return found


# -- shares


def shares(config: str, batch: int) -> dict[str, float]:
    """The share of activations in the bytes, and of recomputation in the seconds."""
    kept, recomputed = (compiled(config, way, batch) for way in FIXED[:2])
    extra = known(recomputed.compiled.xla_seconds) - known(kept.compiled.xla_seconds)
    return {
        "bytes": kept.total,
        "activations": 1 - kept.compiled.argument_bytes / kept.total,
        "recomputation": extra / known(recomputed.compiled.xla_seconds),
    }


# -- tensors


def tensors(config: str) -> dict[str, dict[str, Any]]:
    """By tag: the bytes and the milliseconds of one layer. `best` is the action that frees more
    bytes a second.
    """
    found = {}
    profile = case(config, 8).profile
    kept = keep_tags(profile)
    for block, tag in ((b, t) for b in profile.blocks for t in b.tags):
        size = block.values[tag.value]
        dropped = kept | {block.name: kept[block.name] | {tag.name: RECOMPUTE}}
        again = evaluate(profile, dropped).seconds - evaluate(profile, kept).seconds
        option = {o.choice: o for o in tag.options}
        codec, keep = option[own_codec(tag)], option[KEEP]
        spent = {"recompute": again / block.runs, "compress": codec.seconds - keep.seconds}
        freed = {"recompute": size, "compress": size - codec.device_bytes}
        # Not to write a tensor may save more time than to make it again.
        rates = {way: freed[way] / s if s > 0 else math.inf for way, s in spent.items()}
        found[tag.name] = {
            "bytes": size,
            "compressed": codec.device_bytes,
            "milliseconds": {way: 1e3 * seconds for way, seconds in spent.items()},
            "best": max(rates, key=rates.__getitem__),
        }
    return found


RESULTS = {
    "max_batch": Benchmark(
        [(config, way) for way in (*FIXED, *PLANNED) for config in CONFIGS],
        row=largest,
        summary=of_batches,
    ),
    "throughput": Benchmark(
        [(config, batch) for config in CONFIGS for batch in BATCHES[config]],
        row=seconds,
        summary=of_throughput,
    ),
    "tensors": Benchmark(CONFIGS, row=tensors),
    "shares": Benchmark([(config, batch) for config in CONFIGS for batch in (4, 8)], row=shares),
}

if __name__ == "__main__":
    measure("batches", RESULTS)

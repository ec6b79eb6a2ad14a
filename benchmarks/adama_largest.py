"""The largest BERT that eight devices train, minibatch 256 in 8 microbatches: AdamA beside
accumulation (AdamA, Table 3; M12).

    python -m benchmarks.adama_largest

Compiled deviceless for eight H200s capped to 16, 32 and 80 GB (no compiler here still speaks to a
V100). Depth and width as in GPT-3's table, between its rows by interpolation; sequence 128; layers
recomputed in all. "whole": states in float32 on every device, 12 bytes a parameter and 4 more for
the gradient's sum. "states divided": float32 parameters and moments divided over the devices, with
a bfloat16 copy of the parameters on each, 3.5 bytes a parameter and 4 more for the sum. The bound
is the cap over these; `of the bound` is the largest model found over it. Sizes are found by
compiling; widths are multiples of 16, so that a model is 1 to 2 % larger than the next.
"""

import functools
import math

import numpy as np

from benchmarks.shared.devices import accumulation, adama, compiled_on, count
from benchmarks.shared.results import Report
from experiments.command.load import load
from experiments.config.text import Config
from jaxmem._target.deviceless.compiler import Compiler

DEVICES = 8
CAPS = {f"{size} GB": size * 10**9 for size in (16, 32, 80)}
WAYS = {
    "accumulation, whole": (accumulation, ("nothing",), 16.0),
    "AdamA, whole": (adama, ("nothing",), 12.0),
    "accumulation, states divided": (accumulation, ("states", "bfloat16"), 7.5),
    "AdamA, states divided": (adama, ("states", "bfloat16"), 3.5),
}
GPT3 = ((125e6, 12, 768), (350e6, 24, 1024), (760e6, 24, 1536), (1.3e9, 24, 2048),
        (2.7e9, 32, 2560), (6.7e9, 32, 4096),
        (13e9, 40, 5120), (175e9, 96, 12288))  # fmt: skip
HEADS, STEP = 16, 16  # widths between the table's rows


def sized(parameters: float) -> Config:
    """A BERT of about so many parameters: depth by GPT-3's table, and the width that gives them."""
    known = np.log([row[0] for row in GPT3])
    layers = round(
        float(np.exp(np.interp(math.log(parameters), known, np.log([row[1] for row in GPT3]))))
    )
    vocab = 30522
    solve = lambda width: 12 * layers * width**2 + vocab * width
    width = max(w for w in range(256, 16384, STEP) if solve(w) <= parameters)
    sizes = f"model.layers={layers}", f"model.width={width}", f"model.heads={HEADS}"
    return load("bert_4b", ["train.batch=256", "optimizer.clip=none", *sizes])


def largest(compiler: Compiler, way: str, memory: str) -> dict:
    """By the secant: bytes are nearly proportional to parameters."""
    make, arguments, each = WAYS[way]
    cap = CAPS[memory]
    bound = cap / each
    known: dict[int, int] = {}
    fits, over = None, math.inf
    guess = 0.9 * bound
    for _ in range(6):
        config = sized(guess)
        size = count(config)
        if size not in known:
            made = make(config, DEVICES, *arguments)
            known[size] = compiled_on(compiler, config, DEVICES, made).total_bytes
        total = known[size]
        if total <= cap and (fits is None or size > fits[0]):
            fits = size, total, config.model.layers, config.model.width
        elif total > cap:
            over = min(over, size)
        step = guess * cap / total
        guess = step * 0.998 if step < over else (over + (fits[0] if fits else 0.9 * over)) / 2
        while known.get(count(sized(guess)), 0) > cap:
            guess *= 0.995
        if count(sized(guess)) in known:
            break
    if fits is None:
        return {"parameters": None, "tried": known}
    found = dict(zip(("parameters", "bytes", "layers", "width"), fits))
    return found | {"of the bound": fits[0] / bound, "tried": known}


def summary(report: Report) -> dict:
    return {
        key: {"billion": row["parameters"] / 1e9, "of the bound": row["of the bound"]}
        for key, row in report.results.items()
    }


def main() -> None:
    with Compiler(f"h200:{DEVICES}", workers=1) as compiler:
        cases = [(way, cap) for cap in CAPS for way in WAYS]
        Report("adama_largest").rows(cases, functools.partial(largest, compiler), summary)


if __name__ == "__main__":
    main()

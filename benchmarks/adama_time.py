"""Step time of a GPT on this CPU by how its 8 microbatches become one step: AdamA against
accumulation in place.

    python -m benchmarks.adama_time [--rounds N]

gpt_nano, and the same at width 512 where the states' traffic weighs more; layers recomputed, in
jaxmem.stack in all. Gradients are clipped by value where nothing else is said. Steps run in turns,
in every round in another order; ratios are to "in_place", paired by round: median and quartiles,
by the clock and by all cores' work.
"""

import jax
import numpy as np

from benchmarks.shared.case import nano
from benchmarks.shared.results import Report
from benchmarks.shared.timing import cache_compiles, interleaved
from experiments.gpu_check.measure import quartiles
from experiments.steps.step import abstract, make_step
from jaxmem._core.assignment import Assignment

WAYS = {
    "scan": ("scan", "value"),
    "in_place": ("in_place", "value"),
    "adama": ("adama", "value"),
    "released": ("released", "value"),
    "released, row ratio": ("released", "value", "optimizer.second_moment=row"),
    "released, row ratio, not clipped": ("released", "none", "optimizer.second_moment=row"),
    "released, clipped by component": ("released", "component"),
    "released, clipped by global norm": ("released", "norm"),
}
SIZES = {
    "gpt_nano": (),
    "width 512": ("model.width=512", "train.sequence=64", "train.loss_chunk=64"),
}


def main() -> None:
    report = Report("adama_time", rounds=25)
    cache_compiles()
    for size, overrides in SIZES.items():
        configs = {
            name: nano(
                "model.loop=stack",
                "train.microbatches=8",
                f"optimizer.accumulation={way}",
                f"optimizer.clip={clip}",
                *more,
                *overrides,
            )
            for name, (way, clip, *more) in WAYS.items()
        }
        steps = {
            way: jax.jit(make_step(c, Assignment({"block": {}})), donate_argnums=0)
            .lower(*abstract(c))
            .compile()
            for way, c in configs.items()
        }
        both = interleaved(configs["in_place"], [steps], report.chosen["rounds"], configs)
        for what, seconds in zip(("clock", "cores"), both):
            base = np.asarray(seconds["in_place"])
            for way in WAYS:
                row = report.results.setdefault(f"{size}, {way}", {})
                row[what] = quartiles((np.asarray(seconds[way]) / base).tolist())
    cores = {name: row["cores"]["median"] for name, row in report.results.items()}
    report.summarise({"median of cores' work, to accumulation in place": cores})


if __name__ == "__main__":
    main()

"""Step time of a GPT on this CPU by how its 8 microbatches become one step: AdamA against
accumulation in place.

    python -m benchmarks.adama_time [--rounds N]

gpt_nano, and the same at width 512 where the states' traffic weighs more; layers recomputed, in
jaxmem.stack in all. Gradients are clipped by value where nothing else is said. Steps run in turns,
in every round in another order; ratios are to "in_place", paired by round: median and quartiles,
by the clock and by all cores' work.
"""

from benchmarks.shared.case import compile_planned, nano
from benchmarks.shared.results import Report
from benchmarks.shared.timing import cache_compiles, interleaved, over

COMMON = "model.loop=stack", "train.microbatches=8"
ROW = "optimizer.second_moment=row"
WAYS = {
    "scan": ("scan", "value"),
    "in_place": ("in_place", "value"),
    "adama": ("adama", "value"),
    "released": ("released", "value"),
    "released, row ratio": ("released", "value", ROW),
    "released, row ratio, not clipped": ("released", "none", ROW),
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
        configs = {}
        for name, (way, clip, *more) in WAYS.items():
            own = f"optimizer.accumulation={way}", f"optimizer.clip={clip}"
            configs[name] = nano(*COMMON, *own, *more, *overrides)
        steps = {name: compile_planned(config, {"block": {}}) for name, config in configs.items()}
        both = interleaved(configs["in_place"], [steps], report.chosen["rounds"], configs)
        for way in WAYS:
            report.results[f"{size}, {way}"] = {
                what: over(seconds[way], seconds["in_place"])
                for what, seconds in zip(("clock", "cores"), both)
            }
    report.summarise(summary(report))


def summary(report: Report) -> dict:
    cores = {name: row["cores"]["median"] for name, row in report.results.items()}
    return {"median of cores' work, to accumulation in place": cores}


if __name__ == "__main__":
    main()

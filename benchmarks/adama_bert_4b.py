"""BERT-4B, minibatch 64 in 8 microbatches: device bytes of AdamA beside accumulation in place
(AdamA, Fig. 6; M11).

    python -m benchmarks.adama_bert_4b

One H200, and eight with moments divided over them (ZeRO-1), compiled deviceless; parameters,
moments and gradient sums in float32, computed in bfloat16. The bound of what can be saved is the
gradient sum: 4 bytes a parameter, of what accumulation takes. The paper saves 23.2 % on one device;
over eight, 20.1 GB against divided moments alone, 7.6 GB against divided moments and gradients.
"""

from benchmarks.shared.devices import accumulation, adama, compiled_on, count
from benchmarks.shared.results import Report
from experiments.command.load import load
from jaxmem._target.deviceless.compiler import Compiler

CASES = {
    "accumulation, 1": (1, accumulation, ("nothing",)),
    "AdamA, 1": (1, adama, ("nothing",)),
    "accumulation, moments divided, 8": (8, accumulation, ("moments",)),
    "accumulation, moments and gradients divided, 8": (
        8,
        accumulation,
        ("moments", None, "divided"),
    ),
    "AdamA, moments divided, 8": (8, adama, ("moments",)),
}
# What AdamA saves: accumulation, AdamA.
SAVED = {
    "1": ("accumulation, 1", "AdamA, 1"),
    "8": ("accumulation, moments divided, 8", "AdamA, moments divided, 8"),
    "8, against divided gradients": (
        "accumulation, moments and gradients divided, 8",
        "AdamA, moments divided, 8",
    ),
}
CONFIG = load("bert_4b", ["optimizer.clip=none"])


def row(name: str) -> dict[str, int]:
    devices, make, arguments = CASES[name]
    with Compiler(f"h200:{devices}", workers=1) as compiler:
        found = compiled_on(compiler, CONFIG, devices, make(CONFIG, devices, *arguments))
    return {"bytes": found.total_bytes, "temp_bytes": found.temp_bytes}


def summary(report: Report) -> dict:
    size, told = count(CONFIG), {}
    for name, pair in SAVED.items():
        before, after = (report[key]["bytes"] for key in pair)
        saved = before - after
        own = {"saved bytes": saved, "saved": saved / before, "of the bound": saved / (4 * size)}
        told |= {name: own, f"bound, {name}": 4 * size / before}
    return {"parameters": size} | told


def main() -> None:
    Report("adama_bert_4b").rows(CASES, row, summary)


if __name__ == "__main__":
    main()

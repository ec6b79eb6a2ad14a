"""BERT-4B, minibatch 64 in 8 microbatches: device bytes of AdamA beside accumulation in place
(AdamA, Fig. 6; M11).

    python -m benchmarks.adama_bert_4b

One H200, and eight with moments divided over them (ZeRO-1), compiled deviceless; parameters,
moments and gradient sums in float32, computed in bfloat16. The bound of what can be saved is the
gradient sum: 4 bytes a parameter, of what accumulation takes. The paper saves 23.2 % on one device;
over eight, 20.1 GB against divided moments alone, 7.6 GB against divided moments and gradients.
"""

from benchmarks.shared.devices import accumulation, adama, compiled, count
from benchmarks.shared.results import Report
from experiments.command.load import load
from experiments.config.text import Config
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


def config_of() -> Config:
    return load("bert_4b", ["optimizer.clip=none"])


def main() -> None:
    report, config = Report("adama_bert_4b"), config_of()
    for name, (devices, make, arguments) in CASES.items():
        if not report.has(name):
            with Compiler(f"h200:{devices}", workers=1) as compiler:
                found = compiled(compiler, config, devices, make(config, devices, *arguments))
            report.add(name, {"bytes": found.total_bytes, "temp_bytes": found.temp_bytes})
    size, rows = count(config), {name: row["bytes"] for name, row in report.results.items()}

    def saving(accumulated: str, released: str) -> dict:
        saved = rows[accumulated] - rows[released]
        return {
            "saved bytes": saved,
            "saved": saved / rows[accumulated],
            "of the bound": saved / (4 * size),
        }

    report.summarise(
        {
            "parameters": size,
            "bound, 1": 4 * size / rows["accumulation, 1"],
            "1": saving("accumulation, 1", "AdamA, 1"),
            "bound, 8": 4 * size / rows["accumulation, moments divided, 8"],
            "8": saving("accumulation, moments divided, 8", "AdamA, moments divided, 8"),
            "8, against divided gradients": saving(
                "accumulation, moments and gradients divided, 8", "AdamA, moments divided, 8"
            ),
        }
    )


if __name__ == "__main__":
    main()

"""Speed of every codec on the device at hand, as the GPU check measures it: against a copy in the
same run, and against XLA's own fusion of the reference (`experiments/gpu_check/parts/codecs.py`).

    python -m benchmarks.codecs [--small 1]

`--small 1` is a rehearsal with tiny sizes, such as a CPU's.
"""

from benchmarks.shared.results import Benchmark, Report, measure
from experiments.gpu_check.parts.codecs import speed, speeds, table


def run(report: Report) -> None:
    rows = [report.once(point, speed, point) for point in speeds(bool(report.chosen["small"]))]
    print(table(rows))


RESULTS = {"codecs": Benchmark(run=run, numbers={"small": 0})}

if __name__ == "__main__":
    measure("codecs", RESULTS)

"""Speed of every codec on the device at hand, as the GPU check measures it, without its files.

    python -m benchmarks.codecs [--out FILE] [--small]

What is measured, and how: experiments/gpu_check/parts/codecs.py. --small: a rehearsal.
"""

import argparse
import pathlib
from collections.abc import Sequence

import jax

from experiments.gpu_check.parts.codecs import speed, speeds, table
from jaxmem._core.files import write_json


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.codecs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="takes the rows as JSON")
    parser.add_argument("--small", action="store_true", help="tiny sizes, such as a CPU's")
    args = parser.parse_args(argv)
    rows = []
    for point in speeds(args.small):
        rows.append(speed(point))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    device = {
        "device": jax.local_devices()[0].device_kind,
        "jax": jax.__version__,
        "command": f"python -m benchmarks.codecs{' --small' if args.small else ''}",
    }
    if args.out:
        write_json(args.out, device | {"rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()

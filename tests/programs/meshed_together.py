"""One process of an experiment in several processes:
python -m tests.programs.meshed_together NUMBER COUNT HOST:PORT OUT SETTING ...

The run is `experiments.train gpt_nano`. Process `FAILS` has no batch of step 4. Each batch takes
`PAUSE` seconds. A process prints "joined" once it has found the other processes.
"""

import os
import sys
import time

import jax

from experiments import train
from experiments.command import processes
from experiments.data import text


def main(number: str, count: str, coordinator: str, out: str, *settings: str) -> int:
    sample, join = text.sample, processes.join
    pause = float(os.environ.get("PAUSE", "0"))

    def sampled(data, seed, step, *rest, **part):
        time.sleep(pause / jax.local_device_count())
        if step == 4 and os.environ.get("FAILS") == number:
            raise ValueError("no batch here")
        return sample(data, seed, step, *rest, **part)

    def joined(args):
        join(args)
        print("joined", flush=True)

    text.sample, processes.join = sampled, joined
    place = ["--coordinator", coordinator, "--processes", count, "--process", number]
    return train.main(["gpt_nano", *settings, "--out", out, *place])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

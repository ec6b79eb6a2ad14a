"""One process of an experiment in several processes:
python -m tests.programs.meshed_together NUMBER COUNT PORT OUT SETTING ...

The run is `experiments.train gpt_nano`. Process `FAILS` has no batch of step 4. Each batch takes
`PAUSE` seconds.
"""

import os
import sys
import time

import jax

from experiments import train
from experiments.data import text


def main(number: str, count: str, port: str, out: str, *settings: str) -> int:
    sample, pause = text.sample, float(os.environ.get("PAUSE", "0"))

    def sampled(data, seed, step, *rest, **part):
        time.sleep(pause / jax.local_device_count())
        if step == 4 and os.environ.get("FAILS") == number:
            raise ValueError("no batch here")
        return sample(data, seed, step, *rest, **part)

    text.sample = sampled
    place = ["--coordinator", f"localhost:{port}", "--processes", count, "--process", number]
    return train.main(["gpt_nano", *settings, "--out", out, *place])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

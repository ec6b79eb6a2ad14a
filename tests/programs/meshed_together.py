"""One process of an experiment in several processes:
python -m tests.programs.meshed_together NUMBER COUNT HOST:PORT OUT SETTING ...

The run is `experiments.train gpt_nano`, or by the variable `TRAINS` another command and config.
Process `FAILS` has no batch of step 4. Each batch takes `PAUSE` seconds. A process prints "joined"
once it has found the other processes, and writes the rows that it reads of the first batch to
`ROWS`/NUMBER.json. Of a ResNet, only the first stage's first block remains.
"""

import importlib
import json
import os
import pathlib
import sys
import time

import jax

from experiments.command import processes
from experiments.data import images, text, tokens
from experiments.models import resnet

SAMPLED = {"train": text, "train_glue": tokens, "train_images": images}


def main(number: str, count: str, coordinator: str, out: str, *settings: str) -> int:
    trainer, config = os.environ.get("TRAINS", "train gpt_nano").split()
    data = SAMPLED[trainer]
    sample, join = data.sample, processes.join
    pause, read = float(os.environ.get("PAUSE", "0")), []

    def sampled(examples, seed, step, *rest, **part):
        time.sleep(pause / jax.local_device_count())
        if step == 4 and os.environ.get("FAILS") == number:
            raise ValueError("no batch here")
        if step == 1 and "ROWS" in os.environ:
            (rows,) = (one for one in (*rest, *part.values()) if isinstance(one, slice))
            read.append((rows.start, rows.stop))
            told = pathlib.Path(os.environ["ROWS"]) / f"{number}.json"
            told.write_text(json.dumps(read), "utf-8")
        return sample(examples, seed, step, *rest, **part)

    def joined(args):
        join(args)
        print("joined", flush=True)

    data.sample, processes.join = sampled, joined
    resnet.STAGES[14] = (1,)
    place = ["--coordinator", coordinator, "--processes", count, "--process", number]
    command = importlib.import_module(f"experiments.{trainer}")
    return command.main([config, *settings, "--out", out, *(place if coordinator else ())])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

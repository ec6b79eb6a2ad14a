"""python -m experiments.train_glue CONFIG [section.key=value ...] --out DIR: fine-tunes a BERT on a
GLUE task.

`data.path` is the folder of the GLUE download, `data.task` one of its tasks. Plans for the budget
as `train.py` does, trains, then measures on all validation examples what GLUE measures of the task.
Parameters start at random: experiments save none. `train` takes a BERT's for whoever has them
(`pretrained`).

Writes DIR/metrics.jsonl (a row a step), DIR/summary.json and, where there is a plan, DIR/plan.json
and DIR/report.html.
Exit codes: 0; 2 for input that cannot be used; 3 where the loss is no longer finite; 130 where
interrupted (the summary then tells of the steps done).
"""

import dataclasses
import functools
import math
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

import jaxmem
from experiments.command import cli
from experiments.command.load import load
from experiments.config.glue import GlueConfig
from experiments.config.glue_tasks import TASKS
from experiments.data import glue as glue_data
from experiments.data import tokens as glue_text
from experiments.data.glue import Examples
from experiments.errors import DivergedError
from experiments.models import glue as glue_model
from experiments.running.glue_metrics import measure
from experiments.running.planning import Ready, prepare
from experiments.running.record import (
    Progress,
    check_folder,
    course,
    recording,
    results,
    write_json,
)
from experiments.steps.step import State, init_state


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(
        "experiments.train_glue", "Fine-tune a BERT on a GLUE task, then evaluate it."
    )
    args = parser.parse_intermixed_args(argv)

    def work() -> None:
        name = pathlib.Path(args.config).stem
        config = cli.in_its_dtype(load(args.config, args.overrides, GlueConfig))
        out = check_folder(args.out or pathlib.Path("runs") / name)
        command = [
            "python",
            "-m",
            "experiments.train_glue",
            args.config,
            *args.overrides,
            "--out",
            str(out),
        ]
        train(name, config, out, shlex.join(command))

    return cli.exit_code(work)


def train(
    name: str,
    config: GlueConfig,
    out: pathlib.Path,
    command: str | None = None,
    pretrained: dict | None = None,
) -> dict:
    """The whole run; returns what summary.json says, `command`, which makes it again, included.

    `pretrained`: a BERT's parameters, as `bert.create` makes them, to start from.
    """
    path, task = config.data.path, config.data.task
    examples = glue_data.read(path, task, "train")
    validation = {side: glue_data.read(path, task, side) for side in TASKS[task].dev}
    sizes = (
        f"{len(examples):,} examples to train on, {sum(map(len, validation.values())):,} for"
        " validation"
    )
    print(f"{task} ({path}): {sizes}", file=sys.stderr)
    state = first_state(config, pretrained)
    ready = prepare(config)
    if ready.plan is not None:
        print(ready.plan, flush=True)
    with results(out):
        if ready.plan is not None:
            ready.plan.save(out / "plan.json")
        rows: list[dict] = []
        found, stopped, begun = {}, None, time.perf_counter()
        try:
            state = loop(config, ready.step, state, examples, rows, out / "metrics.jsonl")
            found = evaluate(config, state.params, validation)
        except KeyboardInterrupt as error:
            stopped = error
        summary = _summary(name, config, ready, rows, found)
        summary |= {
            "seconds": time.perf_counter() - begun,
            "interrupted": stopped is not None,
            "command": command,
        }
        write_json(out / "summary.json", summary)
        if ready.plan is not None:
            jaxmem.plans.report(ready.plan, out / "report.html", run=out)
        if stopped is not None:
            raise stopped
    for side, measured in found.items():
        print(
            f"{side}: {', '.join(f'{name} {value:.4f}' for name, value in measured.items())}",
            file=sys.stderr,
        )
    print(f"results in {out}", file=sys.stderr)
    return summary


def first_state(config: GlueConfig, pretrained: dict | None) -> State:
    state = jax.jit(functools.partial(init_state, config))()
    if pretrained is None:
        return state
    return dataclasses.replace(state, params=glue_model.onto(state.params, pretrained))


def loop(
    config: GlueConfig,
    step: Callable,
    state: State,
    examples: Examples,
    rows: list[dict],
    path: pathlib.Path,
) -> State:
    """Trains from `state`; appends to `rows` and to the file at `path`, a step behind the device."""
    t = config.train
    progress = Progress(t.steps, t.log_every, 0)  # its speed is in tokens, and padding is none

    with recording(
        path, rows, progress, "lower optimizer.learning_rate, or clip tighter (optimizer.clip_at)"
    ) as behind:
        for number in range(1, t.steps + 1):
            state, metrics = step(
                state, glue_text.sample(examples, t.seed, number, t.batch, t.sequence)
            )
            behind(number, metrics)
    return state


def evaluate(
    config: GlueConfig, params: dict, validation: dict[str, Examples]
) -> dict[str, dict[str, float]]:
    """Of each file: mean loss, in nats or a score squared, and the task's metrics, over all
    examples, without dropout.
    """
    t, task, scores = config.train, TASKS[config.data.task], jax.jit(glue_model.scores(config))

    def measured(examples: Examples) -> dict[str, float]:
        batches = glue_text.batches(examples, t.batch, t.sequence)
        scores_NK = np.concatenate([scores(params, batch) for batch in batches])
        loss = float(glue_model.losses(task, scores_NK, examples.labels).mean())
        if not math.isfinite(loss):
            raise DivergedError(
                f"the validation loss is {loss} after {t.steps} steps; lower"
                " optimizer.learning_rate"
            )
        predicted_N = scores_NK.argmax(-1) if task.labels else scores_NK[:, 0]
        assert examples.labels is not None, "no test file is measured"
        return {"loss": loss} | measure(task, examples.labels, predicted_N)

    return {side: measured(examples) for side, examples in validation.items()}


def _summary(name: str, config: GlueConfig, ready: Ready, rows: list[dict], found: dict) -> dict:
    plan = ready.plan
    return {
        "config": name,
        "settings": config.model_dump(),
        "policy": ready.policy,
        "found": ready.found,
        **course(rows),
        "val_loss": found[TASKS[config.data.task].dev[0]]["loss"] if found else None,
        "validation": found,
        "budget_bytes": plan and plan.budget_bytes,
        "compiled_bytes": ready.compiled_bytes,
        "baseline_bytes": ready.baseline_bytes,
        "jax_version": jax.__version__,
        "target": plan.target if plan else "local",
    }


if __name__ == "__main__":
    sys.exit(main())

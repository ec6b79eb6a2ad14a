"""python -m experiments.train CONFIG [section.key=value ...] --out DIR: plans for the budget,
trains, evaluates.

Writes DIR/metrics.jsonl (a row a step), DIR/plan.json, DIR/summary.json and, where there is a plan,
a page about the run, DIR/report.html. Exit codes: 0; 2 for input that cannot be used; 3 where the
loss is no longer finite; 130 where interrupted (the summary and the page then tell of the steps
done).
"""

import functools
import math
import pathlib
import shlex
import sys
from collections.abc import Callable, Sequence

import jax

import jaxmem
from experiments.command import cli
from experiments.config.text import Config
from experiments.data import text as data
from experiments.errors import DivergedError
from experiments.models import registry as models
from experiments.running.planning import Ready, prepare
from experiments.running.record import (
    Progress,
    check_folder,
    course,
    recording,
    results,
    write_json,
)
from experiments.steps.step import State, init_state, make_loss


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(
        "experiments.train", "Train an experiment under a plan for its budget, then evaluate it."
    )
    args = parser.parse_intermixed_args(argv)

    def work() -> None:
        name = pathlib.Path(args.config).stem
        config = cli.settings(args.config, args.overrides)
        out = check_folder(args.out or pathlib.Path("runs") / name)
        command = [
            "python",
            "-m",
            "experiments.train",
            args.config,
            *args.overrides,
            "--out",
            str(out),
        ]
        train(name, config, out, shlex.join(command))

    return cli.exit_code(work)


def train(name: str, config: Config, out: pathlib.Path, command: str | None = None) -> dict:
    """The whole run; returns what summary.json says, `command`, which makes it again, included."""
    text = data.read(config.data.path, config.train.sequence)
    sizes = f"{len(text.train):,} bytes to train on, {len(text.validation):,} for validation"
    print(f"{text.source}: {sizes}", file=sys.stderr)
    ready = prepare(config)
    if ready.plan is not None:
        print(ready.plan, flush=True)
        if ready.compiled_bytes > ready.plan.budget_bytes:
            over = f"{ready.compiled_bytes:,} bytes of a budget of {ready.plan.budget_bytes:,}"
            print(
                f"warning: on this device the plan for {ready.plan.target} takes {over}",
                file=sys.stderr,
            )
    with results(out):
        if ready.plan is not None:
            ready.plan.save(out / "plan.json")
        progress = Progress(
            config.train.steps, config.train.log_every, config.train.batch * config.train.sequence
        )
        rows: list[dict] = []
        val_loss, stopped = None, None
        try:
            state = loop(config, ready.step, text, progress, rows, out / "metrics.jsonl")
            val_loss = evaluate(config, state, text)
        except KeyboardInterrupt as error:
            stopped = error
        summary = _summary(name, config, ready, rows, progress.tokens_per_second)
        summary |= {"val_loss": val_loss, "interrupted": stopped is not None, "command": command}
        write_json(out / "summary.json", summary)
        if ready.plan is not None:
            jaxmem.plans.report(ready.plan, out / "report.html", run=out)
        if stopped is not None:
            raise stopped
    print(f"validation loss {val_loss:.4f} nats a byte; results in {out}", file=sys.stderr)
    if ready.plan is not None:
        print(out / "report.html")
    return summary


def loop(
    config: Config,
    step: Callable,
    text: data.Text,
    progress: Progress,
    rows: list[dict],
    path: pathlib.Path,
) -> State:
    """Trains from the first state; appends to `rows` and to the file at `path`, a step behind the
    device.
    """
    state = jax.jit(functools.partial(init_state, config))()
    t = config.train

    with recording(
        path, rows, progress, "lower optimizer.learning_rate, or clip tighter (optimizer.clip_at)"
    ) as behind:
        for number in range(1, t.steps + 1):
            tokens = data.sample(text.train, t.seed, number, t.batch, t.sequence)
            state, metrics = step(state, models.batch(config, tokens, number))
            behind(number, metrics)
    return state


def evaluate(config: Config, state: State, text: data.Text) -> float:
    """Mean validation loss in nats a prediction, over windows spread evenly, without dropout."""
    t, loss = config.train, jax.jit(make_loss(config))
    batches = data.windows(text.validation, t.eval_batches, t.batch, t.sequence)
    values = [
        float(loss(state.params, models.batch(config, rows, i))) for i, rows in enumerate(batches)
    ]
    value = sum(values) / len(values)
    if not math.isfinite(value):
        raise DivergedError(
            f"the validation loss is {value} after {t.steps} steps; lower optimizer.learning_rate"
        )
    return value


def _summary(
    name: str, config: Config, ready: Ready, rows: list[dict], speed: float | None
) -> dict:
    plan = ready.plan
    return {
        "config": name,
        "settings": config.model_dump(),
        "policy": ready.policy,
        "found": ready.found,
        **course(rows),
        "budget_bytes": plan and plan.budget_bytes,
        "predicted_bytes": plan and plan.predicted_bytes,
        "compiled_bytes": plan.compiled_bytes if plan else ready.compiled_bytes,
        "baseline_bytes": ready.baseline_bytes,
        "tokens_per_second": speed,
        "plan_seconds": plan
        and {
            "profile": plan.profile_seconds,
            "solve": plan.solve_seconds,
            "compile": plan.compile_seconds,
        },
        "compiles": plan.compiles if plan else ready.compiles,
        "time_source": plan and plan.time_source,
        "jax_version": jax.__version__,
        "target": plan.target if plan else "local",
    }


if __name__ == "__main__":
    sys.exit(main())

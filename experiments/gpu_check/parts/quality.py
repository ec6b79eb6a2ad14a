"""Trains a character-level GPT with every tag compressed, and again without a plan. Compares the
best validation losses.

Six layers, six heads, width 384, context 256, dropout 0.2, batch 64, 5000 steps: the sizes and
rates of nanoGPT's shakespeare_char. Its README states a best validation loss of 1.47 for the first
90 % of Shakespeare's text. Without `--data` the text is the standard library's, which has no such
figure. Training saves its state regularly, and resumes from it.
"""

import hashlib
import io
import os
import pathlib
import time

import jax
import numpy as np

from experiments.config.text import Config
from experiments.data import text as data
from experiments.gpu_check.settings import Settings
from experiments.running.planning import named
from experiments.steps.step import init_state, make_loss
from jaxmem.plans import compiled_bytes
from jaxmem.runs import write_whole

RUNS = {"unplanned": "keep_everything", "compressed": "compress_tags"}
TARGET = 1.48
EVERY, SAVE = 250, 1000
SIZES = (
    "model.layers=6", "model.heads=6", "model.width=384", "model.dropout=0.2",
    "model.attention_dropout=0.2", "model.dtype=bfloat16", "train.steps=5000", "train.batch=64",
    "train.sequence=256", "train.loss_chunk=256", "train.eval_batches=16",
    "optimizer.learning_rate=1e-3", "optimizer.warmup=100", "optimizer.beta2=0.99",
    "plan.budget=none",
)  # fmt: skip
TINY = ("train.steps=6", "optimizer.warmup=2", "train.eval_batches=1")


def points(settings: Settings) -> list[str]:
    return list(RUNS)


def config_of(settings: Settings, point: str) -> Config:
    return settings.config(
        "gpt_nano", *SIZES, *(TINY if settings.small else ()), f"remat.policy={RUNS[point]}"
    )


def measure(point: str, settings: Settings, rows: dict[str, dict]) -> dict:
    config = config_of(settings, point)
    text = data.read(settings.data, config.train.sequence)
    ready = named(config)
    saved = pathlib.Path(settings.cache) / f"{settings.part}-{point}-{digest(config, text)}.npz"
    history = train(config, ready.step, text, saved, (2, 4) if settings.small else (EVERY, SAVE))
    return {
        "policy": ready.policy,
        "compiled_bytes": compiled_bytes(ready.step),
        "text": os.path.basename(settings.data) if settings.data else "the standard library",
        "text_bytes": len(text.train) + len(text.validation),
        "best_validation_loss": min(loss for _, loss, _ in history),
        "last_validation_loss": history[-1][1],
        "steps": history[-1][0],
        "tokens_per_second": config.train.batch
        * config.train.sequence
        * history[-1][0]
        / sum(s for *_, s in history),
        "step_loss_seconds": history,
    }


def train(
    config: Config, step, text: data.Text, saved: pathlib.Path, often: tuple[int, int]
) -> list[tuple]:
    """Returns evaluations, each with the step, its validation loss, and the seconds of training
    since the last evaluation. `often`: steps between evaluations, and between saves.
    """
    every, save = often
    state, history = restore(saved, jax.jit(init_state, static_argnums=0)(config))
    loss, t, start = jax.jit(make_loss(config)), config.train, time.perf_counter()
    held_out = data.windows(text.validation, t.eval_batches, t.batch, t.sequence)
    for number in range(int(state.step) + 1, t.steps + 1):
        state, _ = step(state, data.sample(text.train, t.seed, number, t.batch, t.sequence))
        if number % every == 0 or number == t.steps:
            jax.block_until_ready(state)
            seconds = time.perf_counter() - start
            history.append(
                (
                    number,
                    float(np.mean([float(loss(state.params, one)) for one in held_out])),
                    seconds,
                )
            )
            if number % save == 0:
                store(saved, state, history)
            start = time.perf_counter()
    return history


def store(path: pathlib.Path, state, history: list[tuple]) -> None:
    content = io.BytesIO()
    arrays = [np.asarray(a) for a in jax.tree.leaves(state)]
    np.savez(content, *arrays, history=np.asarray(history, np.float64))
    write_whole(path, content.getvalue())


def restore(path: pathlib.Path, first) -> tuple:
    """Returns the stored state and history; without a stored state, the first state and []."""
    if not path.exists():
        return first, []
    leaves, structure = jax.tree.flatten(first)
    with np.load(path) as file:
        arrays = [jax.device_put(file[f"arr_{i}"]) for i in range(len(leaves))]
        history = [
            (int(number), float(loss), float(seconds)) for number, loss, seconds in file["history"]
        ]
    return jax.tree.unflatten(structure, arrays), history


def digest(config: Config, text: data.Text) -> str:
    """Returns a digest of the inputs of training, so that a state is used only by its own run."""
    content = config.model_dump_json().encode() + text.train.tobytes()
    return hashlib.sha256(content).hexdigest()[:12]


def summary(rows: dict[str, dict], settings: Settings) -> dict:
    best = {point: row["best_validation_loss"] for point, row in rows.items()}
    found: dict = {"best_validation_loss": best, "target": TARGET}
    if len(best) == len(RUNS):
        found["relative_difference"] = best["compressed"] / best["unplanned"] - 1
    if "compressed" in best and settings.data and not settings.small:
        found["within_target"] = best["compressed"] <= TARGET
    return found

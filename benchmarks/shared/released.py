"""Released steps whose model states may stream: of configs, and of a GPT and a Llama of 24 layers
(width 2048, microbatches of 8 sequences of 1024).
"""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.shared.devices import parameters
from experiments.command.load import load
from experiments.config.text import Config
from experiments.models import registry
from experiments.steps.accumulate import released_step

LAYERS = 24
OWN = ["plan.budget=none", "optimizer.clip=none", "optimizer.accumulation=released"]
OWN += ["model.loop=stack"]
NO_DROPOUT = ["model.dropout=0", "model.attention_dropout=0"]
# Of sequences of 1024, computed in bfloat16.
LONG = ["train.sequence=1024", "train.loss_chunk=128", "model.dtype=bfloat16"]
COMMON = [*OWN, *LONG, f"model.layers={LAYERS}", "model.width=2048", "model.heads=16"]
MODELS = {
    "gpt": ("gpt_1b", NO_DROPOUT),
    "llama": ("llama_nano", ["model.kv_heads=4", "model.hidden=5504", "model.vocab=32000"]),
}


def config_of(model: str, microbatches: int) -> Config:
    """One of `MODELS`, with so many microbatches of 8 sequences."""
    name, own = MODELS[model]
    size = f"train.batch={8 * microbatches}", f"train.microbatches={microbatches}"
    return load(name, [*COMMON, *own, *size])


def planned_step(config: Config, axis: str | None = None) -> tuple[Any, tuple]:
    """What `jaxmem.plan` takes: `build`, and the shapes of the state and of the batch. The state is
    parameters and moments, all on the device.
    """
    build = lambda plan: released_step(config, plan, axis_name=axis, dtype=jnp.bfloat16)
    state = jax.eval_shape(build(None).init, parameters(config))
    return build, (state, registry.batch_shape(config))

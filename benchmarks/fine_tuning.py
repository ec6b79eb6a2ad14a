"""Fine-tuning of Llama 2 7B: plans of whole steps, compiled without hardware.

    python -m benchmarks.fine_tuning [RESULT ...]

A step is `released_step(tx, loss)` with the loss as it is: a `jax.lax.scan` over layers, XLA's
attention, bfloat16 compute, one microbatch. The optimizer is AdamW.

`fine_tuning`: all parameters, 4 sequences of 2048 tokens. `48 GB alone` uses no host memory; `24
GB` has a host of 128 GB, and plans place the states.

`lora_7b`: adapters of rank 16 on the seven products of a layer, 8 sequences of 1024 tokens, for an
H200 within budgets below its memory and 128 GB of host memory, planned jointly. The frozen base is
in bfloat16, or in 8 bits with a float32 scale for each column. With the base "full", all parameters
are trained in float32, without adapters.

`fine_tuning_cards`: cards of 24 GB (RTX 4090) without host memory, one sequence of 2048 tokens for
each card and microbatch. Plans divide the states over the cards. `full` trains all parameters in
float32, by AdamW or by AdamA with four microbatches; the adapters of `LoRA` have rank 16, and the
base is in bfloat16 or in 8 bits. `6 GB` is a budget for each card.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxmem
from benchmarks.shared.case import plain_loop
from benchmarks.shared.devices import parameters
from benchmarks.shared.results import Benchmark, measure
from benchmarks.shared.searches import replacing
from experiments.command.load import load
from experiments.config.text import Config
from experiments.models import llama, registry
from experiments.steps.step import make_loss

LLAMA = (
    "model.hidden=11008", "model.kv_heads=32", "model.attention=fused", "model.loop=scan",
    "train.microbatches=1", "optimizer.clip=none", "optimizer.accumulation=scan",
    "plan.budget=none",
)  # fmt: skip
PLACED = {"host_budget": "128GB", "decide": ("actions", "states")}


def llama_of(batch: int, sequence: int, *more: str) -> Config:
    size = f"train.batch={batch}", f"train.sequence={sequence}"
    return load("mistral_7b", [*LLAMA, *size, *more])


def cast(params, dtype):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), params)


def planned(config: Config, loss, tx, params, trainable=None, **options) -> dict[str, Any]:
    """The plan of a step, and the bytes that it compiles to, of one device."""
    axis = "data" if "sharding" in options.get("decide", ()) else None
    build = lambda plan: jaxmem.released_step(
        tx, loss, plan=plan, trainable=trainable, axis_name=axis
    )
    tokens = registry.batch_shape(config)
    state = jax.eval_shape(build(None).init, params, tokens)
    plan = jaxmem.plan(build, state, tokens, **options)
    return {
        "parameters": optax.tree.size(params),
        "state bytes": sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state)),
        "states": str(plan.places or "on the device"),
        "divided": plan.divided,
        "compiled": plan.compiled_bytes,
        "host compiled": plan.host_bytes,
        "everything kept": plan.baseline_bytes,
        "seconds": plan.predicted_seconds,
    }


# -- fine_tuning

# Target, budgets of device and host, whether plans place states.
MEMORIES = {
    "48 GB alone": {"target": "l40s", "budget": "48GB", "actions": ("recompute",)},
    "24 GB": {"target": "rtx4090", "budget": "24GB"} | PLACED,
}
# The dtype of parameters, and the optimizer.
KINDS = {
    "bfloat16, moments in 8 bits": (jnp.bfloat16, lambda: jaxmem.quantized(optax.adamw(1e-5))),
    "float32, moments in float32": (jnp.float32, lambda: optax.adamw(1e-5)),
}
TUNED = [("48 GB alone", "bfloat16, moments in 8 bits"), *(("24 GB", kind) for kind in KINDS)]


def fine_tuned(memory: str, kind: str) -> dict[str, Any]:
    config, (dtype, optimizer) = llama_of(4, 2048), KINDS[kind]
    params = cast(parameters(config), dtype)
    return planned(config, make_loss(config), optimizer(), params, **MEMORIES[memory])


# -- lora_7b

RANK, FULL = 16, "full"
FITTED = [("bfloat16", 24), ("bfloat16", 12), ("int8", 12), ("int8", 8), (FULL, 24)]  # GB


class Adapted(nnx.Module):
    """A linear layer with a frozen kernel in the dtype `base`, and an adapter (LoRA). A kernel of
    integers has a scale for each column.
    """

    def __init__(self, linear: nnx.Linear, base: str):
        kernel = linear.kernel[...]
        inputs, outputs = kernel.shape
        self.kernel = nnx.Param(kernel.astype(base))
        if base == "int8":
            self.scale = nnx.Param(jnp.ones(outputs))
        self.lora_a = nnx.Param(jnp.ones((inputs, RANK)))
        self.lora_b = nnx.Param(jnp.ones((RANK, outputs)))

    def __call__(self, x, out_sharding=None):
        kernel, a, b = (p[...].astype(x.dtype) for p in (self.kernel, self.lora_a, self.lora_b))
        if hasattr(self, "scale"):
            kernel = kernel * self.scale[...].astype(x.dtype)
        return x @ kernel + (x @ a) @ b


def adapted(base: str):
    """The experiments' block of a Llama, with adapters on its products."""

    class Block(llama.Block):
        def __init__(self, model, rngs):
            super().__init__(model, rngs)
            for name, part in list(vars(self).items()):
                if isinstance(part, nnx.Linear):
                    setattr(self, name, Adapted(part, base))

    return Block


def trainable(params):
    """Whether each parameter is an adapter's."""
    is_adapter = lambda path, _: str(getattr(path[-1], "key", "")).startswith("lora")
    return jax.tree.map_with_path(is_adapter, params)


def with_adapters(config: Config, base: str):
    """The shapes of the parameters, and the loss. With the base "full", there are no adapters."""
    with replacing(*[(llama, "Block", adapted(base))] * (base != FULL)):
        params, loss = parameters(config), make_loss(config, plain_loop)
    if base != FULL:
        params |= {name: cast(params[name], jnp.bfloat16) for name in ("embedding", "head")}
    return params, loss


def planned_with(base: str, config: Config, tx, **options) -> tuple[dict[str, Any], Any]:
    """The row of `planned` for a base, and the parameters that are trained."""
    params, loss = with_adapters(config, base)
    options |= {"actions": jaxmem.plans.LOSSLESS}
    if base == FULL:
        return planned(config, loss, tx, params, **options), params
    trained = jax.tree.map(lambda a, flag: a if flag else None, params, trainable(params))
    return planned(config, loss, tx, params, trainable, **options), trained


def fitted(base: str, gigabytes: str) -> dict[str, Any]:
    """The plan of a step within so many gigabytes."""
    config = llama_of(8, 1024, "train.loss_chunk=1024")
    limits = {"target": "h200", "budget": gigabytes.replace(" ", "")}
    row, trained = planned_with(base, config, optax.adamw(1e-4), **limits, **PLACED)
    return row | {"trained": optax.tree.size(trained)}


# -- fine_tuning_cards

# Cards, budget of each card, base, and microbatches of AdamA; None for AdamW.
CARDS = {
    "full, AdamW, 4 cards": (4, "24GB", FULL, None),
    "full, AdamW, 8 cards": (8, "24GB", FULL, None),
    "full, AdamA, 8 cards": (8, "24GB", FULL, 4),
    "LoRA, bfloat16, 8 cards": (8, "24GB", "bfloat16", None),
    "LoRA, bfloat16, 8 cards, 6 GB": (8, "6GB", "bfloat16", None),
    "LoRA, 8 bits, 8 cards, 6 GB": (8, "6GB", "int8", None),
}
ALONE = {"host_budget": "1MB", "decide": ("actions", "states", "sharding")}


def on_cards(name: str) -> dict[str, Any]:
    cards, budget, base, microbatches = CARDS[name]
    config = llama_of(cards * (microbatches or 1), 2048, "train.loss_chunk=1024")
    tx: Any = optax.adamw(1e-5)
    if microbatches is not None:
        tx = jaxmem.adama(1e-5, accumulation_steps=microbatches, axis_name="data")
    target = f"rtx4090:{cards}"
    return planned_with(base, config, tx, target=target, budget=budget, **ALONE)[0]


RESULTS = {
    "fine_tuning_cards": Benchmark(CARDS, row=on_cards),
    "fine_tuning": Benchmark(TUNED, row=fine_tuned),
    "lora_7b": Benchmark([(base, f"{size} GB") for base, size in FITTED], row=fitted),
}

if __name__ == "__main__":
    measure("fine_tuning", RESULTS)

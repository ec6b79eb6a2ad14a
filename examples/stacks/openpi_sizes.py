"""Plans openpi's fine-tuning step at openpi's sizes for a GPU, from shapes alone.

python -m examples.stacks.openpi_sizes lora rtx4090 [--batch 32] [--budget 20GB] [--out row.json]
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem
from examples.stacks.openpi_shape import Config, Expert, Vision, batch_of, init, train_step

LANGUAGE = Expert(width=2048, depth=18, mlp=16_384, heads=8, kv_heads=1, head_dim=256)
ACTION = dataclasses.replace(LANGUAGE, width=1024, mlp=4096)
REAL = Config(
    language=LANGUAGE,
    action=ACTION,
    vision=Vision(width=1152, depth=27, mlp=4304, heads=16, patch=14),
    vocab=257_152,
    batch=32,
    prompt=48,
    side=224,
    images=3,
    horizon=50,
    action_dim=32,
    dtype=jnp.bfloat16,
)
WAYS = {
    "full": REAL,
    "lora": dataclasses.replace(
        REAL,
        language=dataclasses.replace(LANGUAGE, rank=16),
        action=dataclasses.replace(ACTION, rank=32),
        average=None,
    ),
}


def row_for(
    way: str, target: str, budget: str | None = None, batch: int = REAL.batch
) -> tuple[dict[str, Any], jaxmem.Plan | None]:
    """Plans the step at openpi's sizes from shapes, and returns the numbers of the plan, and the
    plan; None if no plan fits.

    way: a key of `WAYS`.
    target: the name of a device, which the machine need not have.
    budget: bytes of the step; None for the usable memory of the device.
    """
    config = dataclasses.replace(WAYS[way], batch=batch)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2.5e-5))
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(functools.partial(init, config, tx), key)
    examples = jax.eval_shape(functools.partial(batch_of, config), key)
    step = jax.jit(functools.partial(train_step, config), donate_argnums=(1,))
    start, plan = time.perf_counter(), None
    row: dict[str, Any] = {"way": way, "target": target, "batch": batch, "budget": budget}
    try:
        plan = jaxmem.plan(jaxmem.auto(step), key, state, examples, budget=budget, target=target)
    except jaxmem.errors.BudgetError as error:
        row["least bytes found"] = error.least_bytes
    else:
        written = plan.written
        row |= {
            "budget": plan.budget_bytes,
            "bytes of the plan": plan.compiled_bytes,
            "bytes in host memory": plan.host_bytes,
            "bytes as openpi writes it": written.bytes if written else None,
            "seconds as openpi writes it": written.seconds if written else None,
            "seconds of the plan": plan.predicted_seconds,
            "bytes of everything kept": plan.baseline_bytes,
        }
    row["seconds of planning"] = round(time.perf_counter() - start)
    return row, plan


def main() -> None:
    reader = argparse.ArgumentParser()
    reader.add_argument("way", choices=WAYS)
    reader.add_argument("target", help="a device of `jaxmem targets`, such as rtx4090")
    reader.add_argument("--budget", help="bytes of the step; all of the device's by default")
    reader.add_argument("--batch", type=int, default=REAL.batch)
    reader.add_argument("--out", type=pathlib.Path, help="a file for the row, as JSON")
    args = reader.parse_args()
    row, plan = row_for(args.way, args.target, args.budget, args.batch)
    if plan is not None:
        print(plan)
    print(json.dumps(row, indent=1))
    if args.out:
        args.out.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Compares compiled bytes with the device's own count of its peak, in one process for each point.

A plan is made in one process and run in another, since planning itself takes memory. The peak must
occur during steps: `clean` is true if the peak is above the peak before the steps. The device
counts the bytes that its allocator returned. A CPU rehearsal has null for unknown bytes.
"""

import jax

from experiments.gpu_check.settings import Settings
from experiments.gpu_check.steps import example, plan_row, planned, under
from jaxmem.plans import compiled_bytes

APART = True
NAMED = (
    "keep_everything",
    "nothing_saveable",
    "minimal_with_context",
    "minimal_offloaded",
    "compress_tags",
    "every_k=2",
)
SHARES = (0.1, 0.25, 0.45, 0.7)
OTHER = "gpt_345m"
STEPS = 3


def points(settings: Settings) -> list[str]:
    named, shares = (NAMED[:2], (0.3,)) if settings.small else (NAMED, SHARES)
    own = [f"step {settings.model} {name}" for name in named]
    own += [f"{what} {settings.model} {share}" for share in shares for what in ("plan", "step")]
    other = [f"step {OTHER} nothing_saveable", f"plan {OTHER} 0.2", f"step {OTHER} 0.2"]
    return own if settings.small else own + other


def measure(point: str, settings: Settings, rows: dict[str, dict]) -> dict:
    what, model, name = point.split()
    config = settings.config(model)
    if what == "plan":
        ends = (
            compiled_bytes(under(config, end)) for end in ("nothing_saveable", "keep_everything")
        )
        low, high = ends
        return plan_row(config, int(low + float(name) * (high - low)))
    if name[0].isdigit():
        row = rows.get(f"plan {model} {name}", {})
        if "plan" not in row:
            return {"left_out": row.get("infeasible", row.get("error", "there is no plan"))}
        step = planned(config, row)
    else:
        step = under(config, name)
    return peaks(step, config)


def peaks(step, config) -> dict:
    """Returns the compiled bytes, and the device's counts before and after some steps."""
    device = jax.local_devices()[0]
    count = lambda key: (device.memory_stats() or {}).get(key)
    state, tokens = example(config)
    held, before = count("bytes_in_use"), count("peak_bytes_in_use")
    for _ in range(STEPS):
        state, metrics = step(state, tokens)
        jax.block_until_ready((state, metrics))
    after, compiled = count("peak_bytes_in_use"), compiled_bytes(step)
    return {
        "compiled_bytes": compiled,
        "measured_peak_bytes": after,
        "peak_before_steps": before,
        "held_before_steps": held,
        "clean": None if before is None or after is None else after > before,
        "apart": None if after is None else compiled / after - 1,
        "loss": float(metrics["loss"]),
    }


def summary(rows: dict[str, dict], settings: Settings) -> dict:
    steps = {point: row for point, row in rows.items() if "compiled_bytes" in row}
    clean = {point: row["apart"] for point, row in steps.items() if row["clean"]}
    return {
        "steps": len(steps),
        "clean": len(clean),
        "farthest": max(clean.values(), key=abs) if clean else None,
        "apart": clean,
    }

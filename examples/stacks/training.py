"""A library's training step under the library's own jit and under `jaxmem.jit`: bytes and results
of both.
"""

import argparse
import functools
import importlib.metadata
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxmem

RATE = 1e4  # of descent: parameters move by their gradients times this, so that rounding is small


class Training(NamedTuple):
    """step: the jitted step.

    arguments: makes the positional and the keyword arguments; the step donates some of them.
    read: `read(args, kwargs, result)` is the loss and the parameters after a call of the step. A
      step may change modules among its arguments.
    before: the parameters before the call.
    """

    step: Callable
    arguments: Callable[[], tuple[tuple, dict]]
    read: Callable[[tuple, dict, Any], tuple[Any, Any]]
    before: Any


def copied(tree):
    return jax.tree.map(lambda a: jnp.copy(a) if isinstance(a, jax.Array) else a, tree)


def observed(training: Training) -> tuple[float, list]:
    """Runs one step. Returns its loss, and how far each parameter moved: a gradient times `RATE`,
    where the optimizer is descent at this rate.
    """
    args, kwargs = training.arguments()
    loss, after = training.read(args, kwargs, training.step(*args, **kwargs))
    moved = jax.tree.map(jnp.subtract, training.before, after)
    return float(loss), jax.tree.leaves(moved)


def farthest(got: Iterable, want: Iterable) -> float:
    """The largest difference of two gradients, each relative to its largest element."""
    pairs = list(zip(got, want, strict=True))
    largest = [float(jnp.abs(b).max()) for _, b in pairs]
    assert min(largest) > 0, "a gradient is zero: nothing is compared"
    return max(float(jnp.abs(a - b).max()) / size for (a, b), size in zip(pairs, largest))


def nbytes(training: Training) -> int:
    """Bytes of the step on one device, by XLA's memory analysis."""
    args, kwargs = training.arguments()
    compiled = training.step.lower(*args, **kwargs).compile()
    found = getattr(compiled, "compiled", compiled).memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return held + found.temp_size_in_bytes


def main(
    package: str, training: Callable[..., Training], jit: Callable, policies: Mapping[str, Any]
) -> None:
    """Compares the library's own remat policies with a plan, and prints one row.

    training: `training(policy=..., jit=...)`; without `jit` it is jitted as the library does.
    jit: the script's `planned`, which takes the options of `jaxmem.jit`.
    policies: the library's own policies by name. The first one saves everything.
    """
    reader = argparse.ArgumentParser()
    reader.add_argument("--share", type=float, default=0.6, help="budget over the first's bytes")
    reader.add_argument("--out", type=pathlib.Path, help="a file for the row, as JSON")
    args = reader.parse_args()
    own = {name: nbytes(training(policy=policy)) for name, policy in policies.items()}
    kept, *_ = policies.values()
    budget = int(args.share * max(own.values()))
    options = {"budget": budget, "actions": jaxmem.plans.LOSSLESS}
    planned = training(policy=kept, jit=functools.partial(jit, **options))
    loss, moved = observed(planned)
    own_loss, own_moved = observed(training(policy=kept))
    plan = planned.step.plan
    row = {
        "package": f"{package} {importlib.metadata.version(package)}",
        "bytes of its own policies": own,
        "budget": budget,
        "bytes of the plan": plan.compiled_bytes,
        "loss over its own": loss / own_loss,
        "largest difference of a gradient": farthest(moved, own_moved),
    }
    print(plan, json.dumps(row, indent=1), sep="\n")
    if args.out:
        args.out.write_text(json.dumps(row, indent=1) + "\n")

"""How XLA's partitioner divides a kernel's arrays: every device runs it on its own part, and nothing is gathered for it."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

GROUPED = "(k g)"  # an axis of k groups of g values each: divided between groups, never within one
Axes = tuple[str, ...]


class Rule(NamedTuple):
    """The axes of operands and of results, by name: those named alike are divided alike. `whole` are not divided."""

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    whole: Axes
    group: int

    def __str__(self) -> str:
        side = lambda arrays: ", ".join(" ".join(axes) for axes in arrays)
        return f"{side(self.operands)} -> {side(self.results)}"


def partitioned(function: Callable[..., tuple], rule: Rule) -> Callable[..., tuple]:
    """`function` of arrays, divided by `rule` wherever XLA divides them."""

    def partition(mesh, arguments, answers):
        axes = _divided(mesh, arguments, rule)
        layout = lambda names: NamedSharding(mesh, PartitionSpec(*(axes.get(_outer(name)) for name in names)))
        return mesh, function, tuple(map(layout, rule.results)), tuple(map(layout, rule.operands))

    divisible = custom_partitioning(lambda *arrays: function(*arrays))
    named = {name for axes in (*rule.operands, *rule.results) for name in axes}
    sizes: Any = {"g": rule.group} if GROUPED in named else {}
    divisible.def_partition(
        partition,
        sharding_rule=str(rule),
        need_replication_factors=rule.whole,
        **sizes,
    )
    return divisible


@functools.cache
def needs_devices():
    """A program that XLA's partitioner asks about, to be a parameter of whatever is lowered to one.

    JAX tells lowering rules its devices, and their mesh, only where it finds such a program, here or within parameters.
    """
    identity = partitioned(lambda x: (x,), Rule((("n",),), (("n",),), (), 1))
    return jax.make_jaxpr(identity)(jax.ShapeDtypeStruct((1,), "float32"))


def _divided(mesh, arguments, rule: Rule) -> dict[str, tuple]:
    """The mesh axes that divide each axis, as the first operand says that is divided there."""
    found: dict[str, tuple] = {}
    for argument, names in zip(arguments, rule.operands):
        for size, divided, name in zip(argument.shape, argument.sharding.spec, names):
            axes = divided if isinstance(divided, tuple) else (divided,) if divided else ()
            parts = math.prod(mesh.shape[axis] for axis in axes) * (rule.group if name == GROUPED else 1)
            if axes and name not in rule.whole and size % parts == 0:
                found.setdefault(_outer(name), axes)
    return found


def _outer(name: str) -> str:
    return "k" if name == GROUPED else name

"""How XLA's partitioner divides a kernel's arrays: every device runs it on its own part, and
nothing is gathered for it.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

GROUPED = "(k g)"  # an axis of k groups of g values each: divided between groups, never within one
Axes = tuple[str, ...]


class Rule(NamedTuple):
    """The axes of operands and of results, by name: those named alike are divided alike. `whole`
    are not divided.

    `groups` of `group` values each make a row.
    """

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    whole: frozenset[str]
    groups: int
    group: int

    def __str__(self) -> str:
        side = lambda arrays: ", ".join(" ".join(axes) for axes in arrays)
        return f"{side(self.operands)} -> {side(self.results)}"

    @property
    def names(self) -> list[str]:
        """All axes, in the order of their first appearance; the axis of groups is k."""
        found = dict.fromkeys(
            _outer(name) for axes in (*self.operands, *self.results) for name in axes
        )
        return list(found)

    def with_whole_rows(self) -> "Rule":
        """The same, with no row divided."""
        rename = lambda arrays: tuple(
            tuple("n" if a == GROUPED else a for a in axes) for axes in arrays
        )
        return Rule(
            rename(self.operands),
            rename(self.results),
            self.whole | {"n", "k"},
            self.groups,
            self.group,
        )


def partitioned(
    function: Callable[..., tuple], rule: Rule, mesh_sizes: Iterable[int]
) -> Callable[..., tuple]:
    """`function` of arrays, divided by `rule` wherever XLA divides them over a mesh with axes of
    `mesh_sizes`.
    """
    if not _divides(rule.groups, tuple(mesh_sizes)):
        rule = rule.with_whole_rows()

    def partition(mesh, arguments, answers):
        axes = _divided(mesh, arguments, rule)
        layout = lambda names: NamedSharding(
            mesh, PartitionSpec(*(axes.get(_outer(name)) for name in names))
        )
        return mesh, function, tuple(map(layout, rule.results)), tuple(map(layout, rule.operands))

    divisible = custom_partitioning(lambda *arrays: function(*arrays))
    sizes: Any = (
        {"g": rule.group}
        if any(GROUPED in axes for axes in (*rule.operands, *rule.results))
        else {}
    )
    whole = tuple(name for name in rule.names if name in rule.whole)
    divisible.def_partition(
        partition, sharding_rule=str(rule), need_replication_factors=whole, **sizes
    )
    return divisible


@functools.cache
def needs_devices():
    """A program that XLA's partitioner asks about, to be a parameter of whatever is lowered to one.

    JAX tells lowering rules its devices, and their mesh, only where it finds such a program, here
    or within parameters.
    """
    identity = partitioned(lambda x: (x,), Rule((("n",),), (("n",),), frozenset(), 1, 1), ())
    return jax.make_jaxpr(identity)(jax.ShapeDtypeStruct((1,), "float32"))


def _divides(groups: int, mesh_sizes: tuple[int, ...]) -> bool:
    """Whether any mesh axes, one after the other, divide `groups` or leave them be; what fits in
    part, XLA would split.
    """
    if groups < 2:  # JAX's rules know no group of groups of one
        return False
    for order in itertools.permutations([n for n in mesh_sizes if n > 1]):
        left = groups
        for size in order:
            common = math.gcd(left, size)
            if common not in (1, size):
                return False
            left //= common
    return True


def _divided(mesh, arguments, rule: Rule) -> dict[str, tuple]:
    """The mesh axes that divide each axis, as the first operand says that is divided there; each
    divides one axis.
    """
    found: dict[str, tuple] = {}
    for argument, names in zip(arguments, rule.operands):
        for size, divided, name in zip(argument.shape, argument.sharding.spec, names):
            axes = divided if isinstance(divided, tuple) else (divided,) if divided else ()
            parts = math.prod(mesh.shape[axis] for axis in axes) * (
                rule.group if name == GROUPED else 1
            )
            taken = {axis for known in found.values() for axis in known}
            if (
                axes
                and _outer(name) not in {*found, *rule.whole}
                and size % parts == 0
                and not taken & {*axes}
            ):
                found[_outer(name)] = axes
    return found


def _outer(name: str) -> str:
    return "k" if name == GROUPED else name

"""Rules by which XLA's partitioner divides the arrays of a kernel: every device runs the kernel on
its own part, without a gather.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

GROUPED = "(k g)"  # an axis of k groups of g values each: divided between groups, never within one
Axes = tuple[str, ...]


class Rule(NamedTuple):
    """A rule by which devices divide arrays: axes of one name are divided alike. The text of the
    rule is JAX's sharding rule, such as "a0 (k g) -> a0 k h, a0 k".

    operands: the names of each operand's axes.
    results: the names of each result's axes.
    whole: the axes that are not divided.
    groups: number of groups of a row.
    group: number of values of a group.
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

    def of_part(self, params: dict[str, Any], arrays: Sequence[Any]) -> dict[str, int]:
        """Returns the parameters of an operation that differ for a device's part of the arrays: the
        width of a row, for a decoder, whose first array are codes.
        """
        if "width" not in params:
            return {}
        return {"width": min(params["width"], arrays[0].shape[-2] * self.group)}

    def with_whole_rows(self) -> "Rule":
        """Returns the rule without divided rows: the values of a row are then one axis, n."""
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
    """Returns a function that runs `function` on every device's own part of the arrays, if XLA
    divides the arrays over a mesh with axes of `mesh_sizes`. `rule` divides the arrays.
    """
    if not _divides(rule.groups, tuple(mesh_sizes)):
        rule = rule.with_whole_rows()

    # JAX calls `partition` when shardings are known. It returns the function that each device runs,
    # and the shardings of the results and of the operands.
    def partition(mesh, arguments, answers):
        axes = _divided(mesh, arguments, rule)
        # Axes of the rule that nothing divides have no entry, and are whole on every device.
        layout = lambda names: NamedSharding(
            mesh, PartitionSpec(*(axes.get(_outer(name)) for name in names))
        )
        return mesh, function, tuple(map(layout, rule.results)), tuple(map(layout, rule.operands))

    # Where XLA divides nothing, `function` itself runs on whole arrays.
    divisible = custom_partitioning(lambda *arrays: function(*arrays))
    # JAX infers all sizes from shapes, except the size of g, which is only in a compound axis.
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


class Typed(NamedTuple):
    """The shardings of arrays whose types have explicit shardings.

    mesh: the mesh; all of its axes are explicit.
    operands, results: the PartitionSpec of each array.
    parts: the types of one device's parts of the operands.
    """

    mesh: Any
    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]
    parts: tuple[jax.ShapeDtypeStruct, ...]

    def over(self, function: Callable[..., tuple]) -> Callable[..., tuple]:
        """Returns a function that runs `function` on every device's own part of the arrays."""
        # Unchecked: the references of a kernel may make constants without a varying type.
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=self.operands,
            out_specs=self.results,
            check_vma=False,
        )

        def divided(*arrays):
            # The sharding of an array may differ from the rule: it may divide a group, or divide
            # two arrays differently along one axis of the rule.
            given = (
                jax.sharding.reshard(array, NamedSharding(self.mesh, spec))
                for array, spec in zip(arrays, self.operands)
            )
            return mapped(*given)

        return divided


def as_typed(rule: Rule, avals: Sequence[Any]) -> Typed | None:
    """Returns the shardings by which `rule` divides arrays of these types. Returns None unless all
    mesh axes are explicit: only then the types have shardings.
    """
    mesh = avals[0].sharding.mesh
    explicit = AxisType.Explicit
    if mesh.empty or any(
        kind != explicit and mesh.shape[name] > 1
        for name, kind in zip(mesh.axis_names, mesh.axis_types)
    ):
        return None
    if not _divides(rule.groups, tuple(mesh.shape.values())):
        rule = rule.with_whole_rows()
    axes = _divided(mesh, avals, rule)
    by = lambda name: axes.get(_outer(name), ())
    layout = lambda names: PartitionSpec(*(by(name) or None for name in names))
    part = lambda size, name: size // math.prod(mesh.shape[axis] for axis in by(name))
    parts = tuple(
        jax.ShapeDtypeStruct(tuple(map(part, a.shape, names)), a.dtype)
        for a, names in zip(avals, rule.operands)
    )
    return Typed(mesh, tuple(map(layout, rule.operands)), tuple(map(layout, rule.results)), parts)


@functools.cache
def needs_devices():
    """Returns a traced program with a partitioning rule, to be a parameter of an operation.

    JAX passes the devices and their mesh to lowering rules only if the program has such an
    equation, also within an equation's parameters. An operation gets its own equation only when it
    is lowered, which is too late. So it carries this equation.
    """
    identity = partitioned(lambda x: (x,), Rule((("n",),), (("n",),), frozenset(), 1, 1), ())
    return jax.make_jaxpr(identity)(jax.ShapeDtypeStruct((1,), "float32"))


def _divides(groups: int, mesh_sizes: tuple[int, ...]) -> bool:
    """Whether XLA divides a row only between groups, for all choices of mesh axes.

    In every order, each mesh axis must divide the remaining number of groups, or have no divisor in
    common with it. If only a part of a mesh axis fits, XLA would split the axis, and divide within
    a group.
    """
    if groups < 2:  # JAX's rules do not support a compound axis with one group
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
    """Returns the mesh axes that divide each axis of the rule, by the outer name of the axis.

    The first operand that is divided along an axis decides. A mesh axis divides one axis at most,
    and divides rows only if each part has whole groups.
    """
    found: dict[str, tuple] = {}
    for argument, names in zip(arguments, rule.operands):
        for size, divided, name in zip(argument.shape, argument.sharding.spec, names):
            # A sharding names one mesh axis, a tuple of them, or None.
            axes = divided if isinstance(divided, tuple) else (divided,) if divided else ()
            # The divisor of the axis length: a row needs whole groups on every device.
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
    """Returns the name of the divided axis. For a row, it is k, the axis of groups."""
    return "k" if name == GROUPED else name

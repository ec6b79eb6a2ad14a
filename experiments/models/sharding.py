"""How a mesh divides a model: the rules of parameters, states, batches and activations.

The axes of the mesh are "data", "fsdp", "tensor" and "expert". "data", "fsdp" and "expert" divide
the rows of a batch. "fsdp" also divides parameters and moments (ZeRO-3): XLA gathers a layer's
parameters where the layer runs, and sums its gradient into the parts. "tensor" divides the features
inside a layer as in Megatron (Shoeybi et al., 2019): each device has a part of the heads and of the
MLP's features. "expert" also divides the experts of a layer: the devices of this axis gather their
rows, each device computes the rows by its own experts, and the results are summed. A ResNet has
neither such features nor experts: "data" and "fsdp" divide it. Sums over a batch are sums over the
rows of all devices, batch norm's statistics included.

The rules apply to arrays by their names, so that a model's functions are written for one device.
The alternative is a list of logical axes for each array, which a second table maps to the axes of
the mesh, as in MaxText. With twenty kinds of arrays, one table is shorter, and shows each array's
division at once.

`jax.set_mesh` sets the mesh (`within`). Without a mesh, no function here changes anything. Axes are
automatic, so that XLA derives how to divide an operation; or explicit, so that the types of arrays
show their division. JAX then derives the type of each operation's result, and raises an error where
operands disagree. The step of a GPT or a Llama has explicit axes throughout (`step`): the model
gathers a layer's parameters over the axes of rows (`gathered`), and names the division of a
product's result where it is summed over "tensor" (`like`). JAX itself looks up embeddings and draws
random bits with automatic axes. In the steps of other models, and in evaluation, only arguments and
results are explicit: inside, operands disagree, such as the outputs of experts and their gates.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.config import sections
from experiments.errors import InputError

AXES = tuple(sections.Mesh().sizes)
ROWS = ("data", "fsdp", "expert")  # the axes that divide the rows of a batch

# The axes of each dimension. A parameter of a layer has a leading axis of layers, which no axis
# divides. Other parameters are whole on each device.
RULES = {
    "embedding": P("tensor", "fsdp"),
    "head": P("tensor", "fsdp"),
    **dict.fromkeys(("positions", "segments"), P(None, "fsdp")),
    **dict.fromkeys(("qkv.kernel", "q.kernel", "k.kernel", "v.kernel"), P("fsdp", "tensor")),
    **dict.fromkeys(("up.kernel", "gate.kernel"), P("fsdp", "tensor")),
    **dict.fromkeys(("proj.kernel", "down.kernel"), P("tensor", "fsdp")),
    **dict.fromkeys(("qkv.bias", "up.bias"), P("tensor")),
    **dict.fromkeys(("transform.kernel", "pooler.kernel"), P("fsdp", "tensor")),  # BERT's heads
    **dict.fromkeys(("classifier.kernel", "head.kernel"), P("fsdp", None)),  # few classes
    **dict.fromkeys(
        ("stem.kernel", *(f"conv{number}.kernel" for number in range(4))),
        P(None, None, None, "fsdp"),
    ),
    "experts.router": P("fsdp", None),
    "experts.up": P("expert", "fsdp", "tensor"),
    "experts.up_bias": P("expert", "tensor"),
    "experts.down": P("expert", "tensor", "fsdp"),
    "experts.down_bias": P("expert", None),
    "all_BSD": P(("data", "fsdp"), None, None),  # the tokens that an expert computes
    "experts_EBSF": P("expert", ("data", "fsdp"), None, "tensor"),
    "batch": P(ROWS),
    "microbatches": P(None, ROWS),
    "x_BHWC": P(ROWS),  # the activations between two blocks of a ResNet
    "x_BSD": P(ROWS, None, None),  # the activations between two layers
    "x_BSD, sequence": P(ROWS, "tensor", None),  # with sequence parallelism
    "heads_BSHK": P(ROWS, None, "tensor", None),
    "qkv.kernel, heads": P(None, None, "tensor"),  # (D, 3, D) with explicit axes
    # Features inside a layer. With sequence parallelism, XLA would divide them along the sequence,
    # and gather the layer's whole weights instead of activations.
    "features_BSF": P(ROWS, None, "tensor"),
}


def sizes(mesh: sections.Mesh, devices: int) -> tuple[int, ...]:
    """Returns the sizes of the axes over `devices` devices. -1 takes the devices that remain.

    Raises InputError if the mesh does not fit the number of devices.
    """
    wanted = mesh.sizes
    others = math.prod(size for size in wanted.values() if size != -1)
    free = next((name for name in AXES if wanted[name] == -1), None)
    if devices % others if free else others > devices:
        allowed = f"a divisor of {devices}" if free else f"at most {devices}"
        raise InputError(
            f"mesh: got {' * '.join(f'{name} = {size}' for name, size in wanted.items())}; allowed:"
            f" a product, without -1, that is {allowed}, the number of devices"
        )
    return tuple(devices // others if size == -1 else size for size in wanted.values())


def over(mesh: sections.Mesh, devices: int | None = None) -> Mesh | AbstractMesh | None:
    """Returns the mesh over the devices of all processes, or over `devices` absent devices. None
    if a single process uses one device.
    """
    if not mesh.divides and jax.process_count() == 1:
        return None
    shape = sizes(mesh, devices or jax.device_count())
    kinds = (AxisType.Explicit if mesh.axes == "explicit" else AxisType.Auto,) * len(AXES)
    if devices is not None:
        return AbstractMesh(shape, AXES, axis_types=kinds)
    if (used := math.prod(shape)) < jax.device_count() and jax.process_count() > 1:
        raise InputError(
            f"mesh: got {used} devices; allowed in {jax.process_count()} processes: all"
            f" {jax.device_count()} devices, such as mesh.data = -1"
        )
    return jax.make_mesh(shape, AXES, axis_types=kinds, devices=jax.devices()[:used])


def within(mesh: Mesh | AbstractMesh | None) -> contextlib.AbstractContextManager:
    """Returns a context in which `mesh` divides what is traced; None changes nothing."""
    if mesh is None:
        return contextlib.nullcontext()
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return jax.set_mesh(mesh)


def check(config, devices: int) -> None:
    """Raises InputError if an axis does not divide a dimension of a transformer's parameters or
    batch.
    """
    shape = dict(zip(AXES, sizes(config.mesh, devices)))
    train, model, tensor = config.train, config.model, shape["tensor"]
    check_rows(config, devices)
    for key, dimension, by in (
        ("model.width", model.width, shape["fsdp"]),
        ("model.heads", model.heads, tensor),
        ("model.experts", model.experts, shape["expert"]),
        ("model.kv_heads", model.kv_heads or model.heads, tensor),
        ("model.hidden", model.hidden_width, tensor),
        ("train.sequence", train.sequence, tensor if config.mesh.sequence else 1),
    ):
        if dimension % by:
            raise InputError(
                f"{key}: got {dimension}; allowed with mesh = {shape}: a multiple of {by}"
            )


def check_rows(config, devices: int) -> None:
    """Raises InputError if the devices do not divide the rows of a microbatch."""
    shape = dict(zip(AXES, sizes(config.mesh, devices)))
    train, rows = config.train, math.prod(shape[name] for name in ROWS)
    if (got := train.batch // train.microbatches) % rows:
        each = " in a microbatch" if train.microbatches > 1 else ""
        raise InputError(
            f"train.batch: got {got}{each}; allowed with mesh = {shape}: a multiple of {rows}"
        )


def spec(path: tuple, array: Any, shape: dict[str, int]) -> P:
    """Returns the rule of an array in a tree of states. The rule of a parameter also applies to its
    moments, and to a moment that lacks the parameter's last dimensions. A dimension that the axes
    do not divide, such as a vocabulary of 50,257 tokens or the scale of a row, is whole.
    """
    names = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
    rule = RULES.get(".".join(names[-2:]), RULES.get(names[-1] if names else "", P()))
    axes = (None, *rule) if "blocks" in names else tuple(rule)
    return _fitting(axes, array.shape, shape)


def _fitting(axes: tuple, dimensions: tuple[int, ...], shape: dict[str, int]) -> P:
    """Returns the axes that divide the dimensions of an array, as a `PartitionSpec`."""

    def fits(axis, dimension: int) -> bool:
        named = axis if isinstance(axis, tuple) else (axis,) * (axis is not None)
        return dimension % math.prod(shape[name] for name in named) == 0

    return P(*(axis if fits(axis, size) else None for axis, size in zip(axes, dimensions)))


def specs(state: Any, shape: dict[str, int]) -> Any:
    """Returns the rules of all arrays of a state."""
    return jax.tree_util.tree_map_with_path(lambda path, a: spec(path, a, shape), state)


def current() -> Mesh | AbstractMesh | None:
    """Returns the mesh of the context, outside of a traced function."""
    mesh = jax.sharding.get_mesh()
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    return mesh if is_ours(mesh) else None


def is_ours(mesh: Mesh | AbstractMesh) -> bool:
    """Whether a mesh has the axes of the rules. A released step that a plan divides maps itself
    over a mesh of the axis "data" alone.
    """
    return mesh.axis_names == AXES


def shardings(state: Any) -> Any:
    """Returns the shardings of a state on the mesh of the context; None without a mesh."""
    if (mesh := current()) is None:
        return None
    put = lambda spec: NamedSharding(mesh, spec)
    return jax.tree.map(put, specs(state, dict(mesh.shape)), is_leaf=lambda a: isinstance(a, P))


def shapes(state: Any, batch: Any) -> tuple[Any, Any]:
    """Returns the shapes of a state and of a batch, with their shardings if a mesh is set."""
    if (mesh := current()) is None:
        return state, batch
    return jax.tree.map(_shape, state, shardings(state)), rows_shape(batch, mesh)


def rows_shape(batch: Any, mesh: Mesh | AbstractMesh | None) -> Any:
    """Returns the shape of a batch on a mesh."""
    if mesh is None:
        return batch
    return jax.tree.map(lambda a: _shape(a, _of_rows(a, mesh)), batch)


def _of_rows(a: Any, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns the division of an array of a batch. A short batch, which evaluation may have, is
    whole on each device.
    """
    return NamedSharding(mesh, _fitting(tuple(RULES["batch"]), a.shape, dict(mesh.shape)))


def _shape(a: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


def place_rows(rows: Callable[[slice], Any], shape: Any) -> Any:
    """Returns a batch, a tree of arrays. `rows(part)` reads the rows of the slice `part`. With a
    mesh, the batch has the shapes of the tree `shape`, and each process reads the rows of its
    devices only.
    """
    if (mesh := current()) is None:
        return rows(slice(None))
    part = functools.cache(lambda start, stop: jax.tree.leaves(rows(slice(start, stop))))
    leaves, tree = jax.tree.flatten(shape)

    def placed(number: int, a: Any) -> jax.Array:
        read = lambda index: part(index[0].start, index[0].stop)[number]
        return jax.make_array_from_callback(a.shape, _of_rows(a, mesh), read)

    return tree.unflatten([placed(number, a) for number, a in enumerate(leaves)])


def place_whole(batch: Any) -> Any:
    """Returns a batch that each process has read whole, with the rows divided if a mesh is set."""
    return place_rows(lambda part: jax.tree.map(lambda a: a[part], batch), batch)


def constrain(x, rule: str):
    """Returns an activation, divided by a rule of the table if a mesh is set. For use in a traced
    function.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not is_ours(mesh):
        return x
    place = jax.sharding.reshard if is_typed(mesh) else jax.lax.with_sharding_constraint
    return place(x, _fitting(tuple(RULES[rule]), x.shape, dict(mesh.shape)))


def gathered(parameters: Any) -> Any:
    """Returns parameters as the products of a step read them if the axes are explicit: whole over
    the axes of rows. Automatic axes need no gather, which XLA inserts.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not is_typed(mesh):
        return parameters
    shape = dict(mesh.shape)

    def whole(path: tuple, a):
        axes = (None if axis in ROWS else axis for axis in spec(path, a, shape))
        return jax.sharding.reshard(a, P(*axes))

    return jax.tree_util.tree_map_with_path(whole, parameters)


def like(x) -> Any:
    """Returns the sharding of `x` if the axes are explicit, as the argument `out_sharding` of a
    product whose result is added to `x`; None otherwise.
    """
    return jax.typeof(x).sharding if is_typed(jax.sharding.get_abstract_mesh()) else None


def looked_up(table_VD, tokens_BS):
    """Returns the rows of a table by their numbers, (B, S, D), divided as activations are."""
    mesh = jax.sharding.get_abstract_mesh()
    if not is_typed(mesh):
        return table_VD[tokens_BS]
    axes = _fitting(tuple(RULES["batch"]), tokens_BS.shape, dict(mesh.shape))
    return table_VD.at[tokens_BS].get(out_sharding=P(*axes, None, None))


def of_rows(x_BSD):
    """Returns an activation that only its rows divide if the axes are explicit, as the input of a
    product whose features "tensor" divides; unchanged otherwise.
    """
    return constrain(x_BSD, "x_BSD") if typed() else x_BSD


def microbatched(a, n: int):
    """Returns an array of a batch (B, ...) as (n, B / n, ...), whose second axis devices divide."""
    if typed():
        a = jax.sharding.reshard(a, P())
    parts = a.reshape(n, -1, *a.shape[1:])
    return constrain(parts, "microbatches") if typed() else parts


def typed() -> bool:
    """Whether the axes of the mesh in the context are explicit. For use in a traced function."""
    return is_typed(jax.sharding.get_abstract_mesh())


def is_typed(mesh: AbstractMesh) -> bool:
    """Whether the types of arrays have their shardings: the axes of a mesh are explicit."""
    return is_ours(mesh) and AxisType.Explicit in mesh.axis_types


def automatic(
    function: Callable[..., Any], out: Callable[..., Any] = lambda *_: P()
) -> Callable[..., Any]:
    """Returns a function whose operations XLA divides, whatever the types of the axes. `out(*args)`
    is the tree of the results' `PartitionSpec`s; by default, each device has whole results. Without
    a mesh, the function is unchanged.
    """

    def divided(*args):
        mesh = jax.sharding.get_abstract_mesh()
        if not is_ours(mesh):
            return function(*args)
        found = out(*args)
        is_spec = lambda a: isinstance(a, P)

        def constrained(*args):
            place = lambda spec, a: jax.tree.map(
                lambda a: jax.lax.with_sharding_constraint(a, spec), a
            )
            return jax.tree.map(place, found, function(*args), is_leaf=is_spec)

        if AxisType.Explicit not in mesh.axis_types:
            return constrained(*args)
        return jax.sharding.auto_axes(constrained, axes=AXES, out_sharding=found)(*args)

    return divided


def step(function: Callable[..., Any], is_explicit: bool = False) -> Callable[..., Any]:
    """Returns step(state, batch) -> (state, metrics), whose new state is divided as the old one.

    `is_explicit`: whether explicit axes remain explicit inside the step, for which each product of
    `function` needs operands whose shardings agree. Otherwise XLA divides its operations.
    """

    def out(state, batch):
        return specs(state, dict(jax.sharding.get_abstract_mesh().shape)), P()

    divided = automatic(function, out)

    def chosen(state, batch):
        if not (is_explicit and typed()):
            return divided(state, batch)
        state, metrics = function(state, batch)
        place = lambda spec, a: jax.sharding.reshard(a, spec)
        is_spec = lambda a: isinstance(a, P)
        return jax.tree.map(place, out(state, batch)[0], state, is_leaf=is_spec), metrics

    return chosen

"""Arrays divided over the devices of a mesh axis (ZeRO-1): the layout of the parts, the scatter of
gradients to the parts, and the gather of whole parameters from the parts.

Divided moments are recognised by their shapes. Inside `jax.shard_map` a part is smaller than its
parameter along one dimension, and the gradient is scattered along that dimension. The alternative
is a layout that is stored together with the state; shapes make it unnecessary.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem._core.lists import merged, separated
from jaxmem._model.states.store import counted, fetch, put
from jaxmem._model.tags.operations import wide


def divided(whole: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    """Returns the dimension along which an array of shape `whole` is divided into parts of shape
    `part`; None if the shapes are equal, and the array is not divided.
    """
    return next((d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b), None)


def shards(params, size: int, axis_name: str, first: int = 0):
    """Returns a PartitionSpec for each array: it is divided along its first dimension whose length
    the number of devices divides.

    An array without such a dimension is not divided: for example a bias of odd length.

    params: a tree of arrays or their shapes.
    size: the number of devices.
    axis_name: the mesh axis of the devices.
    first: the first dimension that may be divided.
    """

    def one(a):
        # `None` for each dimension before the divided dimension; later ones may be left out
        d = next((d for d in range(first, len(a.shape)) if a.shape[d] % size == 0), None)
        return PartitionSpec() if d is None else PartitionSpec(*[None] * d, axis_name)

    return jax.tree.map(one, params)


def placed(tree, layout, mesh):
    """Returns `tree` with the shardings of `layout`, a prefix tree of PartitionSpecs.

    On a mesh without explicit axes, `tree` is returned unchanged: `jax.shard_map` reshards its
    arguments to its specs.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return tree
    move = lambda spec, part: jax.tree.map(
        lambda a: jax.reshard(a, NamedSharding(mesh, spec)), part
    )
    return jax.tree.map(move, layout, tree)


def scattered(gradient, like, axis_name: str | None):
    """Returns the mean gradient over the devices. If the moments of an array are divided, the
    result is this device's part of the mean gradient.

    gradient: this device's gradient, a tree of whole arrays.
    like: a tree of the same structure with the shapes of the moments.
    axis_name: the mesh axis; None returns the gradient unchanged.
    """
    if axis_name is None:
        return gradient
    size = jax.lax.axis_size(axis_name)

    # Every array becomes a mean, scattered or not: `psum_scatter` sums, hence the division.
    def one(g, m):
        if (d := divided(g.shape, m.shape)) is None:
            return jax.lax.pmean(g, axis_name)
        return jax.lax.psum_scatter(g, axis_name, scatter_dimension=d, tiled=True) / size

    return jax.tree.map(one, gradient, like)


def total(own, gradient, axis_name: str | None):
    """Returns the squared norm of a gradient over the parts of all devices, in float32 or float64.

    own: this device's part of the gradient, as `scattered` returned it.
    gradient: the whole arrays. An array of `own` with another shape is a part.
    axis_name: the mesh axis over which the squared norms of parts are summed.
    """
    pairs = list(zip(jax.tree.leaves(own), jax.tree.leaves(gradient)))
    squares = lambda a: jnp.sum(jnp.square(jnp.abs(a.astype(wide(a.dtype)))))
    norm = lambda arrays: sum(map(squares, arrays), jnp.zeros((), jnp.float32))
    # A whole array is equal on all devices and counts once. The sums of parts are added up.
    whole = norm([a for a, g in pairs if a.shape == g.shape])
    parts = [a for a, g in pairs if a.shape != g.shape]
    return whole + jax.lax.psum(norm(parts), axis_name) if parts else whole


def part_of(a, like, axis_name: str):
    """Returns this device's part of a whole array. The part has the shape of `like`."""
    if (d := divided(a.shape, like.shape)) is None:
        return a
    return jax.lax.dynamic_slice_in_dim(
        a, jax.lax.axis_index(axis_name) * like.shape[d], like.shape[d], d
    )


def gathered(part, like, axis_name: str):
    """Gathers the parts of all devices to an array with the shape of `like`."""
    if (d := divided(like.shape, part.shape)) is None:
        return part
    return jax.lax.all_gather(part, axis_name, axis=d, tiled=True)


def refilled(stacked, parts, axis_name: str):
    """Gathers the parts of stacked arrays into `stacked`, one layer at a time and in place.

    In addition to `stacked`, only one whole layer is in memory, and no second whole stack.

    stacked: a tree of whole arrays with a leading axis of layers; their content is replaced.
    parts: a tree of the same structure with this device's parts. If its arrays are whole, they are
      the result.
    axis_name: the mesh axis over which the arrays are divided.
    """
    if all(a.shape == b.shape for a, b in zip(jax.tree.leaves(stacked), jax.tree.leaves(parts))):
        return parts

    def one(stacked, i, _):
        new = jax.tree.map(
            lambda p, a: gathered(p.astype(a.dtype), a, axis_name),
            fetch(parts, i),
            fetch(stacked, i),
        )
        return put(stacked, new, i), None

    return counted(one, stacked, None, 0, jax.tree.leaves(stacked)[0].shape[0])[0]


def assembled(parts: list, shapes: list, axis_name: str, dtype) -> list:
    """Gathers stacked arrays from the devices' parts, one layer at a time. Whole arrays are
    returned unchanged.

    parts: this device's arrays, with a leading axis of layers.
    shapes: arrays or structs with the shapes of the whole arrays.
    axis_name: the mesh axis over which parts are divided.
    dtype: the dtype of the gathered arrays; None means the dtypes of the parts.
    """
    which = [a.shape != like.shape for a, like in zip(parts, shapes)]
    # Only the divided arrays need zeros to fill; the whole arrays are results themselves.
    (own, whole), (likes, _) = separated(parts, which), separated(shapes, which)
    empty = [jnp.zeros(like.shape, dtype or a.dtype) for a, like in zip(own, likes)]
    return merged((refilled(empty, own, axis_name) if empty else [], whole), which)

"""ZeRO-1: moments divided over the devices of a mesh axis, gradients scattered to them, parameters
gathered again.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem._states.stacked import at, put


def divided(whole: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    """The dimension along which arrays of shape `part` divide one of shape `whole`; None where they
    are equal.
    """
    return next((d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b), None)


def shards(params, size: int, axis_name: str, first: int = 0):
    """PartitionSpecs: arrays are divided over `size` devices along the first dimension, from
    `first` on, that they divide.

    Arrays that none divides stay whole, such as a bias of odd length.
    """

    def one(a):
        d = next((d for d in range(first, len(a.shape)) if a.shape[d] % size == 0), None)
        return PartitionSpec() if d is None else PartitionSpec(*[None] * d, axis_name)

    return jax.tree.map(one, params)


def placed(tree, layout, mesh):
    """`tree` as a prefix tree of PartitionSpecs lays it out, on a mesh whose axes are explicit;
    others need no telling.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return tree
    put = lambda spec, part: jax.tree.map(lambda a: jax.reshard(a, NamedSharding(mesh, spec)), part)
    return jax.tree.map(put, layout, tree, is_leaf=lambda spec: isinstance(spec, PartitionSpec))


def scattered(gradient, like, axis_name: str | None):
    """The mean gradient over the devices, each with its part, where the shapes of `like` are parts;
    else the same.
    """
    if axis_name is None or all(
        a.shape == b.shape for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(like))
    ):
        return gradient
    size = jax.lax.axis_size(axis_name)

    def one(g, m):
        if (d := divided(g.shape, m.shape)) is None:
            return jax.lax.pmean(g, axis_name)
        return jax.lax.psum_scatter(g, axis_name, scatter_dimension=d, tiled=True) / size

    return jax.tree.map(one, gradient, like)


def total(own, gradient, axis_name: str | None):
    """The squared norm of a gradient of which `own` is this device's part."""
    pairs = list(zip(jax.tree.leaves(own), jax.tree.leaves(gradient)))
    wide = lambda g: g.astype(jnp.promote_types(jnp.float32, g.dtype))
    norm = lambda arrays: sum(
        (jnp.sum(jnp.square(jnp.abs(wide(a)))) for a in arrays), jnp.zeros((), jnp.float32)
    )
    whole = norm([a for a, g in pairs if a.shape == g.shape])
    parts = [a for a, g in pairs if a.shape != g.shape]
    return whole + jax.lax.psum(norm(parts), axis_name) if parts else whole


def part_of(a, like, axis_name: str):
    """This device's part of an array, of the shape of `like`."""
    if (d := divided(a.shape, like.shape)) is None:
        return a
    return jax.lax.dynamic_slice_in_dim(
        a, jax.lax.axis_index(axis_name) * like.shape[d], like.shape[d], d
    )


def gathered(part, like, axis_name: str):
    """The array of the shape of `like` of which every device has a part."""
    if (d := divided(like.shape, part.shape)) is None:
        return part
    return jax.lax.all_gather(part, axis_name, axis=d, tiled=True)


def refilled(stacked, parts, axis_name: str):
    """Stacked arrays, a layer at a time replaced in place by what the devices have parts of: never
    two of them whole.
    """
    if all(a.shape == b.shape for a, b in zip(jax.tree.leaves(stacked), jax.tree.leaves(parts))):
        return parts

    def one(stacked, i):
        new = jax.tree.map(
            lambda p, a: gathered(p.astype(a.dtype), a, axis_name), at(parts, i), at(stacked, i)
        )
        return put(stacked, new, i), None

    return jax.lax.scan(one, stacked, jnp.arange(jax.tree.leaves(stacked)[0].shape[0]))[0]


def assembled(parts: list, shapes: list, axis_name: str, dtype) -> list:
    """Stacked arrays of these shapes, in `dtype`, out of the devices' parts; those that are whole
    are as they were.
    """
    which = [a.shape != like.shape for a, like in zip(parts, shapes)]
    empty = [
        jnp.zeros(like.shape, dtype or a.dtype)
        for a, like, part in zip(parts, shapes, which)
        if part
    ]
    filled = iter(
        refilled(empty, [a for a, part in zip(parts, which) if part], axis_name) if empty else ()
    )
    return [next(filled) if part else a for a, part in zip(parts, which)]

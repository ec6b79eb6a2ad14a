"""Equations of `jax.shard_map`: the mesh axes over which an array varies inside, and the functions
that make arrays vary.

Types have these axes if `shard_map` checks them (`check_vma`). Otherwise no axis is known.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.core import AbstractValue
from jax.extend.core import JaxprEqn


def mapped_axes(eqn: JaxprEqn) -> Mapping[str, int] | None:
    """Returns the mesh axes by which a `jax.shard_map` divides arrays, with their sizes; None for
    every other primitive. XLA divides by the other axes of the equation's "mesh". The equation's
    "jaxpr" is the program of one device.
    """
    if eqn.primitive.name != "shard_map":
        return None
    mesh, axes = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    return {axis: mesh.shape[axis] for axis in sorted(axes)}


def axes_of(a) -> frozenset[str]:
    """Returns the mesh axes over which an array, or its shape, differs from device to device; none
    where nothing is checked.
    """
    is_type = isinstance(a, jax.ShapeDtypeStruct | AbstractValue)
    kind = getattr(a if is_type else jax.typeof(a), "manual_axis_type", None)
    return getattr(kind, "varying", frozenset())


def varying(tree, axes):
    """Returns the same values, as arrays that may differ along `axes` (a name, several, or None for
    none).
    """
    wanted = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)

    def one(a):
        missing = tuple(axis for axis in wanted if axis not in axes_of(a))
        return jax.lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(one, tree)


def is_checked(axis: str) -> bool:
    """Whether types show if an array varies along `axis` here."""
    # Where nothing is checked, the type of an array that was made to vary does not show it.
    return axis in axes_of(varying(jnp.zeros(()), axis))


def zeros(like):
    """Returns zeros with the shapes, dtypes and varying mesh axes of `like`."""
    return jax.tree.map(lambda a: varying(jnp.zeros_like(a), sorted(axes_of(a))), like)

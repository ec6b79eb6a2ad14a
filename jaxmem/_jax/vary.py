"""Which axes of `jax.shard_map` an array varies over, as its type says where the mesh checks it
(`check_vma`).
"""

import jax
import jax.numpy as jnp


def axes_of(a) -> frozenset[str]:
    """The mesh axes over which an array, or its shape, differs from device to device; none where
    nothing is checked.
    """
    kind = getattr(
        a if isinstance(a, jax.ShapeDtypeStruct) else jax.typeof(a), "manual_axis_type", None
    )
    return getattr(kind, "varying", frozenset())


def varying(tree, axes):
    """The same values, as arrays that may differ along `axes` (a name, several, or None for
    none).
    """
    wanted = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)

    def one(a):
        missing = tuple(axis for axis in wanted if axis not in axes_of(a))
        return jax.lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(one, tree)


def is_checked(axis: str) -> bool:
    """Whether types tell if an array varies along `axis` here."""
    return axis in axes_of(varying(jnp.zeros(()), axis))


def zeros(like):
    """Zeros with the shapes, dtypes and varying mesh axes of `like`."""
    return jax.tree.map(lambda a: varying(jnp.zeros_like(a), sorted(axes_of(a))), like)

"""For which GPU a program is lowered, and who divides its arrays among several."""

import contextlib
import contextvars
import enum
from collections.abc import Iterator

import jax

OLDEST = 80  # what a kernel is compiled for where nobody says: it runs on this compute capability and later ones
_chosen: contextvars.ContextVar[int | None] = contextvars.ContextVar("jaxmem_compute_capability", default=None)


class Split(enum.Enum):
    """`NONE`: the arrays are whole, or `shard_map` has divided them. `AUTOMATIC`: XLA will, and asks the kernel's rule.
    `UNKNOWN`: XLA will, where nobody can be asked (an exported program), or along the axes that a `shard_map` left."""

    NONE = enum.auto()
    AUTOMATIC = enum.auto()
    UNKNOWN = enum.auto()


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Lowers kernels in its body for GPUs of a compute capability, such as 90, whatever device is at hand."""
    token = _chosen.set(capability)
    try:
        yield
    finally:
        _chosen.reset(token)


def of(ctx) -> int:
    """The compute capability that a lowering's context is for, as 90."""
    if (chosen := _chosen.get()) is not None:
        return chosen
    for device in (*_devices(ctx.module_context.axis_context), *jax.local_devices()):
        if device.platform in ("gpu", "cuda") and (found := getattr(device, "compute_capability", None)):
            major, minor = str(found).split(".")
            return 10 * int(major) + int(minor)
    return OLDEST


def split(ctx) -> Split:
    """Who divides arrays where a primitive is lowered."""
    module, axes = ctx.module_context, ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is not None:
        free = [n for name, n in mesh.shape.items() if name not in axes.manual_axes]
        return Split.NONE if all(n == 1 for n in free) else Split.UNKNOWN
    if getattr(axes, "num_devices", None) == 1:
        return Split.NONE
    return Split.UNKNOWN if module.lowering_parameters.for_export else Split.AUTOMATIC


def _devices(axes) -> tuple:
    """Of a lowering's context; none where it does not know any."""
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        return tuple(getattr(axes, "device_assignment", None) or ())
    try:
        return tuple(mesh.devices.flat)
    except (AttributeError, ValueError):  # an abstract mesh has none
        return ()

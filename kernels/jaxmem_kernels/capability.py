"""For which GPUs a program is lowered, and who divides its arrays among several."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

OLDEST = 80  # what a kernel is compiled for where nobody says: it runs on this compute capability and later ones
_chosen: contextvars.ContextVar[int | None] = contextvars.ContextVar("jaxmem_compute_capability", default=None)
_abstract: contextvars.ContextVar[bool] = contextvars.ContextVar("jaxmem_abstract_devices", default=False)


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Lowers kernels in its body for GPUs of a compute capability, such as 90, whatever is at hand."""
    token = _chosen.set(capability)
    try:
        yield
    finally:
        _chosen.reset(token)


@contextlib.contextmanager
def abstract_devices() -> Iterator[None]:
    """Traces operations in its body for an abstract mesh: nothing is asked of devices, and divided arrays take references."""
    token = _abstract.set(True)
    try:
        yield
    finally:
        _abstract.reset(token)


def is_abstract() -> bool:
    return _abstract.get()


def of(ctx) -> int:
    """The compute capability that a lowering's context is for, as 90."""
    if (chosen := _chosen.get()) is not None:
        return chosen
    for device in (*_devices(ctx.module_context.axis_context), *jax.local_devices()):
        if device.platform in ("gpu", "cuda") and (found := getattr(device, "compute_capability", None)):
            major, minor = str(found).split(".")
            return 10 * int(major) + int(minor)
    return OLDEST


def is_whole(ctx) -> bool:
    """Whether XLA divides no array where a primitive is lowered: on one device, or where `shard_map` has divided them."""
    axes = ctx.module_context.axis_context
    if (mesh := getattr(axes, "mesh", None)) is not None:
        return all(n == 1 for name, n in mesh.shape.items() if name not in axes.manual_axes)
    return getattr(axes, "num_devices", None) == 1


def asks(ctx) -> bool:
    """Whether XLA, where it divides arrays, asks a kernel how: not of an exported program, nor along axes that a `shard_map` left."""
    known = getattr(ctx.module_context.axis_context, "device_assignment", None) is not None
    return known and not ctx.module_context.lowering_parameters.for_export


def _devices(axes) -> tuple:
    """Of a lowering's context; none where it does not know any."""
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        return tuple(getattr(axes, "device_assignment", None) or ())
    try:
        return tuple(mesh.devices.flat)
    except (AttributeError, ValueError):  # an abstract mesh has none
        return ()

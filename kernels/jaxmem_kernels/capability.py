"""Tells for which GPU a program is lowered, and who divides its arrays among several."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import jax


class Wanted(NamedTuple):
    """What a context asks of programs that are traced and lowered in it.

    capability: the compute capability to lower for, such as 90; None means that of the device.
    kernels: whether kernels are used; else references alone.
    devices: whether operations ask JAX for the program's devices.
    """

    capability: int | None = None
    kernels: bool = True
    devices: bool = True


_ANYTHING = Wanted()
_wanted: contextvars.ContextVar[Wanted] = contextvars.ContextVar(
    "jaxmem_kernels_wanted", default=_ANYTHING
)
# It is a part of the keys of JAX's caches, so that what was lowered under another wish is not taken
# from them.
_key = jax.make_user_context(None)


@contextlib.contextmanager
def _wanting(**changes) -> Iterator[None]:
    wanted = _wanted.get()._replace(**changes)
    token = _wanted.set(wanted)
    try:
        with _key(wanted):
            yield
    finally:
        _wanted.reset(token)


def compiling_for(capability: int) -> contextlib.AbstractContextManager[None]:
    """A context that lowers kernels for GPUs of a compute capability, such as 90, whatever device
    is at hand.
    """
    return _wanting(capability=capability)


def references() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which codecs are lowered to their jax.numpy references, without kernels.

    Use the context to compare kernels with their references.
    """
    return _wanting(kernels=False)


def abstract_devices() -> contextlib.AbstractContextManager[None]:
    """A context that traces operations for a mesh without devices: nobody asks for its devices, and
    divided arrays take references.
    """
    return _wanting(devices=False)


def wants_kernels() -> bool:
    return _wanted.get().kernels


def wants_devices() -> bool:
    """Whether a program that is traced now may be one that GPUs divide."""
    wanted = _wanted.get()
    return wanted.devices and (
        wanted.capability is not None or jax.default_backend() in ("gpu", "cuda")
    )


def of(ctx) -> int | None:
    """The compute capability that a program is lowered for, such as 90; None where nobody knows.

    ctx: JAX's context of a lowering rule.
    """
    if (chosen := _wanted.get().capability) is not None:
        return chosen
    module = ctx.module_context
    # An exported program may run anywhere. Else its own devices say it, or those at hand.
    for device in (
        ()
        if module.lowering_parameters.for_export
        else (*_devices(module.axis_context), *jax.local_devices())
    ):
        if device.platform in ("gpu", "cuda") and (
            found := getattr(device, "compute_capability", None)
        ):
            major, minor = str(found).split(".")
            return 10 * int(major) + int(minor)
    return None


def is_whole(ctx) -> bool:
    """Whether XLA divides no array where a primitive is lowered: on one device, or where
    `shard_map` has divided them.
    """
    axes = ctx.module_context.axis_context
    # Within `shard_map` the context has a mesh, of which XLA divides the axes that are not manual.
    # Elsewhere the number of devices says it.
    if (mesh := getattr(axes, "mesh", None)) is not None:
        return all(n == 1 for name, n in mesh.shape.items() if name not in axes.manual_axes)
    return getattr(axes, "num_devices", None) == 1


def asks(ctx) -> bool:
    """Whether XLA's partitioner will call our partitioning rule.

    It does not for exported programs, nor for mesh axes that an enclosing `shard_map` leaves
    automatic.
    """
    axes, parameters = ctx.module_context.axis_context, ctx.module_context.lowering_parameters
    known = (
        getattr(axes, "device_assignment", None) is not None
        and getattr(axes, "abstract_mesh", None) is not None
    )
    return (
        known
        and not parameters.for_export
        and getattr(jax.config, "jax_use_shardy_partitioner", True)
    )


def mesh_sizes(ctx) -> tuple[int, ...]:
    """The sizes of the mesh axes of a context that `asks`."""
    return tuple(ctx.module_context.axis_context.abstract_mesh.shape.values())


def _devices(axes) -> tuple:
    """The devices of a lowering's context; none where it does not know any."""
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        return tuple(getattr(axes, "device_assignment", None) or ())
    try:
        return tuple(mesh.devices.flat)
    except (AttributeError, ValueError):  # an abstract mesh has none
        return ()

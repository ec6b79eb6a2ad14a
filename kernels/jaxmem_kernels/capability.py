"""Finds the GPU for which a program is lowered, and whether XLA divides its arrays over devices."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import jax


class Wanted(NamedTuple):
    """The settings of a context for programs that are traced and lowered in it.

    capability: the compute capability to lower for, such as 90; None means the device's.
    kernels: whether kernels are used; otherwise only references are used.
    devices: whether operations request the program's devices from JAX.
    """

    capability: int | None = None
    kernels: bool = True
    devices: bool = True


_ANYTHING = Wanted()
_wanted: contextvars.ContextVar[Wanted] = contextvars.ContextVar(
    "jaxmem_kernels_wanted", default=_ANYTHING
)
# The settings are a part of the keys of JAX's caches, so that JAX does not reuse a program that was
# lowered under other settings.
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
    """Returns a context that lowers kernels for GPUs of a compute capability, such as 90, instead
    of the local device's.
    """
    return _wanting(capability=capability)


def references() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which codecs are lowered to their jax.numpy references, without kernels.

    Use the context to compare kernels with their references.
    """
    return _wanting(kernels=False)


def abstract_devices() -> contextlib.AbstractContextManager[None]:
    """Returns a context that traces operations for a mesh without devices: operations do not
    request devices, and run references on divided arrays.
    """
    return _wanting(devices=False)


def wants_kernels() -> bool:
    return _wanted.get().kernels


def wants_devices() -> bool:
    """Whether several GPUs may divide the arrays of a program that is traced now."""
    wanted = _wanted.get()
    return wanted.devices and (
        wanted.capability is not None or jax.default_backend() in ("gpu", "cuda")
    )


def of(ctx) -> int | None:
    """Returns the compute capability that a program is lowered for, such as 90; None if unknown.

    ctx: JAX's context of a lowering rule.
    """
    if (chosen := _wanted.get().capability) is not None:
        return chosen
    module = ctx.module_context
    # An exported program may run anywhere. Otherwise the program's devices decide, or the local
    # devices.
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
    """Whether XLA divides no array of a primitive: the program runs on one device, or `shard_map`
    has divided the arrays.
    """
    axes = ctx.module_context.axis_context
    # Within `shard_map` the context has a mesh. XLA divides arrays over the axes that are not
    # manual. Outside `shard_map` the number of devices decides.
    if (mesh := getattr(axes, "mesh", None)) is not None:
        return all(n == 1 for name, n in mesh.shape.items() if name not in axes.manual_axes)
    return getattr(axes, "num_devices", None) == 1


def calls_our_rule(ctx) -> bool:
    """Whether XLA's partitioner will call our partitioning rule.

    The partitioner does not call the rule in exported programs, nor for mesh axes that an enclosing
    `shard_map` leaves automatic.
    """
    # Remove with GSPMD: the option `jax_use_shardy_partitioner`, which JAX 0.12 still has.
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
    """Returns the sizes of the mesh axes. `calls_our_rule` must be true for the context."""
    return tuple(ctx.module_context.axis_context.abstract_mesh.shape.values())


def _devices(axes) -> tuple:
    """Returns the devices of a lowering's context; none if the context has no devices."""
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        return tuple(getattr(axes, "device_assignment", None) or ())
    try:
        return tuple(mesh.devices.flat)
    except (AttributeError, ValueError):  # an abstract mesh has no devices
        return ()

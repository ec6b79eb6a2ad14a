"""The bytes of a traced step's arguments on one device, and the number of devices that divide them;
arguments that are functions of a size.
"""

import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jaxmem._trace.jaxpr import needed
from jaxmem.errors import StepError


def argument_bytes(traced: jax.stages.Traced, args: tuple, devices: int) -> int:
    """Returns bytes of the arguments on one device. No plan reduces them.

    Arguments that the step does not read are left out, since `jax.jit` drops them, and so are those
    in host memory.

    traced: the step, as `jaxmem._trace.step.trace` returns JAX's stage of it.
    args: the arguments that the step was traced for.
    devices: the number of devices. An argument counts as divided over all of them if its sharding
      is not known here, and `jax.jit(in_shardings=)` may set it.
    """
    # Without dead code, the inputs of the jaxpr are the arguments that the program reads.
    _, read = needed(traced.jaxpr.jaxpr)
    total = 0
    for aval, is_read, parts in zip(traced.jaxpr.in_avals, read, divisors(traced, args)):
        if is_read and not on_host(aval):
            # Bits, rounded up to whole bytes a device, since int4 arguments are packed.
            bits = math.prod(aval.shape) * _bits(aval.dtype)
            total += -(-bits // (8 * (devices if parts is None else parts)))
    return total


def are_on_several_devices(args: tuple) -> bool:
    """Whether any argument has a sharding over several devices."""
    shardings = [getattr(a, "sharding", None) for a in jax.tree.leaves(args)]
    return any(s is not None and s.num_devices > 1 for s in shardings)


def divisors(traced: jax.stages.Traced, args: tuple) -> list[int | None]:
    """Returns over how many devices each argument is divided; None where neither the argument, nor
    `jax.jit(in_shardings=)`, nor its type says so.

    On a mesh with automatic axes the argument or the jit says so, on one with explicit axes the
    type.
    """
    each = _axes_of_arguments(traced, args)
    return [None if axes is None else math.prod(axes.values()) for axes in each]


def shardings_of(traced: jax.stages.Traced, args: tuple) -> list[NamedSharding | None]:
    """Returns the sharding of each argument over a mesh; None as in `divisors`."""
    avals, leaves = traced.jaxpr.in_avals, jax.tree.leaves(args)
    same = len(leaves) == len(avals) and all(
        getattr(leaf, "shape", None) == aval.shape for leaf, aval in zip(leaves, avals)
    )  # else the step flattens its arguments in a way of its own
    if not same:
        leaves = [None] * len(avals)
    # Remove with a public name: JAX 0.10 to 0.12 exports none for a jit's `in_shardings`.
    declared = getattr(traced, "_params", {}).get("in_shardings", ())
    if len(declared) != len(avals):
        declared = [None] * len(avals)
    return [_sharding(leaf, said, aval) for leaf, said, aval in zip(leaves, declared, avals)]


def _axes_of_arguments(traced: jax.stages.Traced, args: tuple) -> list[Mapping[str, int] | None]:
    """The mesh axes that divide each argument, with their sizes; None as in `divisors`."""
    each = shardings_of(traced, args)
    return [None if s is None else {a: s.mesh.shape[a] for a in _named(s)} for s in each]


def shards_of(traced: jax.stages.Traced, args: tuple, devices: int) -> int:
    """Returns over how many devices a block's tensors are divided."""
    return math.prod(batch_axes(traced, args, devices).values())


def batch_axes(traced: jax.stages.Traced, args: tuple, devices: int) -> Mapping[str, int]:
    """Returns the mesh axes that divide a block's tensors, with their sizes: the axes of the most
    divided argument that is not donated.

    Data-parallel and fully sharded steps divide activations as their batch, which is not donated.
    Model states are donated, and may be divided further.
    """
    if devices == 1:
        return {}
    infos = jax.tree.leaves(traced.args_info)
    each = zip(infos, _axes_of_arguments(traced, args))
    found = [axes for info, axes in each if not info.donated and axes is not None]
    return max(found, key=lambda axes: math.prod(axes.values()), default={})


def input_shardings(executable: jax.stages.Compiled) -> Sequence[Sharding | None]:
    """The sharding of each leaf of a compiled step's arguments; None for a leaf that the step does
    not read.
    """
    # Remove with a public name: the property `input_shardings` of JAX 0.10 to 0.12 makes the user's
    # containers of them, and a container may check in its constructor that its leaves are arrays.
    return executable._input_shardings_flat()


def _sharding(leaf, declared, aval) -> NamedSharding | None:
    """The sharding of one argument over a mesh: as the argument says, else as its jit does, else as
    its type does.

    leaf: the argument; None if the input cannot be matched with an argument.
    declared: its entry of the jit's `in_shardings`; no sharding where these do not say.
    aval: its type in the trace.
    """
    typed = getattr(aval, "sharding", None)
    for sharding in (getattr(leaf, "sharding", None), declared, typed):
        if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
            continue
        # A type that names no axis may be divided over automatic axes, which types do not show; an
        # argument whose own sharding names none is whole on each device.
        if _named(sharding) or sharding is not typed:
            return sharding
    return None


def _named(sharding: NamedSharding) -> list[str]:
    """The mesh axes that a sharding names."""
    # An entry of a spec is an axis, a tuple of axes, or None; only names of axes count.
    spec = [axes if isinstance(axes, tuple) else (axes,) for axes in sharding.spec]
    return [name for axes in spec for name in axes if name in sharding.mesh.shape]


def _bits(dtype) -> int:
    """Bits of an element in an argument. XLA packs elements of less than a byte."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 * dtype.itemsize


def on_host(aval) -> bool:
    """Whether a value is in host memory, by its type."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host  # tokens have none


def shard_bytes(a, sharding: Sharding | None = None) -> int:
    """Bytes of an array's part on one device; of a shape's.

    sharding: how it is divided; None for its own sharding, whole if it has none.
    """
    sharding = getattr(a, "sharding", None) if sharding is None else sharding
    shape = a.shape if sharding is None else sharding.shard_shape(a.shape)
    return math.prod(shape) * a.dtype.itemsize


def is_function(arg) -> bool:
    """Whether an argument is a plain function: modules are called too, and are arguments."""
    kinds = types.FunctionType | types.MethodType | functools.partial
    return isinstance(arg, kinds) and not isinstance(arg, jax.tree_util.Partial)


def sized(args: tuple, size: int) -> tuple:
    """The arguments, with what functions among them return for a size."""
    return tuple(_called(i, a, size) if is_function(a) else a for i, a in enumerate(args))


def _called(position: int, function: Callable[[int], Any], size: int):
    """What a function returns for a size; its arrays are not made, and shapes stand for them."""
    others: list = []  # a leaf that is no array; None for an array
    structure = None

    def arrays():
        nonlocal structure
        leaves, structure = jax.tree.flatten(function(size))
        is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        others.extend(None if is_one else leaf for leaf, is_one in zip(leaves, is_array))
        return [leaf for leaf, is_one in zip(leaves, is_array) if is_one]

    try:
        shapes = iter(jax.eval_shape(arrays))
    except Exception as error:
        raise StepError(
            f"plan: argument {position} of the step is a function of a size, and failed for {size}:"
            f" {type(error).__name__}: {error}; expected arrays or jax.ShapeDtypeStructs"
        ) from error
    assert structure is not None
    return jax.tree.unflatten(structure, [next(shapes) if o is None else o for o in others])


def key_impl(aval):
    """The generator of random keys with a shape and a dtype. JAX returns it for arrays and tracers,
    not for dtypes.
    """
    found = []
    spec = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), spec)
    return found[0]

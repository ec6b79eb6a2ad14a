"""Makes operations with a reference in jax.numpy, and with kernels for GPUs and TPUs. JAX chooses
between them when a program is lowered.

Each operation is a primitive. For CUDA and for TPUs, the primitive lowers to its kernel if the
kernel takes the arrays, and else to its reference. On every other platform, the primitive lowers to
its reference. The reference defines the derivative and the result types. Under `vmap`, a mapped `x`
has one more leading axis. If XLA partitions a program, each GPU runs the kernel on its own part
(`partition`).

`jax.lax.platform_dependent` was the first choice, in place of a primitive. A lowering rule for CUDA
sees devices, export and `shard_map`; a branch of `platform_dependent` does not.

TPUs divide kernels by types. libtpu ignores `custom_partitioning`, and no other hook shows how XLA
divides an array on automatic axes. So TPUs run the reference on these axes. On explicit axes, the
type of an array shows its sharding when a program is lowered, and a `shard_map` in place of the
kernel survives an export.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmem_kernels import capability
from jaxmem_kernels.gpu import adapter
from jaxmem_kernels.partition import Rule, as_typed, needs_devices, partitioned


class Kernel(NamedTuple):
    """The kernels of an operation: a GPU's kernel in place of the reference, and the rule by which
    GPUs and TPUs divide the arrays of a kernel.

    launch: `launch(capability, *arrays, **params)` returns a tuple of the reference's results. None
      if all GPUs run the reference.
    takes: `takes(*avals, **params)` returns whether the kernel can run on the arrays, and is faster
      than the reference.
    rule: `rule(*avals, **params)` returns the rule by which devices divide the arrays.
    shared: the indices of the operands without leading axes, which `vmap` must not map.
    """

    launch: Callable[..., tuple] | None
    takes: Callable[..., bool]
    rule: Callable[..., Rule]
    shared: tuple[int, ...] = ()


_references: dict[Primitive, Callable[..., Any]] = {}
_without_gpu_kernel: set[Primitive] = set()


def reference_of(eqn) -> Any:
    """Returns the closed jaxpr of an operation's reference, which has the operands and the results
    of the equation; None for the equations of other primitives.
    """
    if (traced := _references.get(eqn.primitive)) is None:
        return None
    params = {name: value for name, value in eqn.params.items() if name != "divided"}
    # Without shardings: their mesh may not be the mesh of the caller.
    return traced(
        tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars), params
    )


def has_gpu_kernel(eqn) -> bool:
    """Whether an equation is an operation that GPUs can run as a kernel, or whose reference
    consists of such operations.
    """
    return eqn.primitive in _references and eqn.primitive not in _without_gpu_kernel


def operation(reference: Callable[..., Any], kernel: Kernel | None) -> Callable[..., Any]:
    """Returns an operation with the name, the arguments and the results of `reference(*arrays,
    **params)`. `params` are hashable.

    kernel: the kernel of GPUs. None for a reference that consists of other operations, each with a
      kernel of its own, which TPUs run as one kernel. `vmap` maps such a reference, and thereby its
      operations.

    The primitive has one more parameter, `divided`: `partition.needs_devices()`, or None if GPUs
    cannot divide the program. JAX finds the equation in this parameter; no code reads it.
    """
    primitive = Primitive(f"jaxmem_{reference.__name__}")
    primitive.multiple_results = True

    # The results of the reference, as a tuple in any case. References broadcast over ranks.
    @jax.numpy_rank_promotion("allow")
    def results(*arrays, divided=None, **params) -> tuple:
        found = reference(*arrays, **params)
        return found if isinstance(found, tuple) else (found,)

    # The trace of the reference has the types of the results. The types have shardings, and so
    # depend on the mesh too.
    @functools.cache
    def traced(avals, params, mesh):
        return jax.make_jaxpr(functools.partial(results, **dict(params)))(*avals)

    @functools.cache
    def compiled(params):
        return jax.jit(lambda *arrays: primitive.bind(*arrays, **dict(params)))

    # The operation computes the values, and the reference the tangents. Codes are integers, and JAX
    # requires symbolic zeros as their tangents.
    def derivative(primals, tangents, **params):
        tangents = tuple(map(ad.instantiate_zeros, tangents))
        found = primitive.bind(*primals, **params)
        moved = jax.jvp(functools.partial(results, **params), primals, tangents)[1]
        none = lambda y, t: (
            ad.Zero(jax.typeof(y).to_tangent_aval()) if t.dtype == jax.dtypes.float0 else t
        )
        return found, list(map(none, found, moved))

    # If `vmap` maps exactly the operands with leading axes, the operation runs with one more axis.
    # Otherwise the mapped reference runs, for example if each example has scales of its own.
    def mapped(arrays, dims, **params):
        if kernel and all((d is None) == (i in kernel.shared) for i, d in enumerate(dims)):
            front = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(arrays, dims)]
            found = primitive.bind(*front, **params)
        else:
            found = jax.vmap(functools.partial(results, **params), dims)(*arrays)
        return found, [0] * len(found)

    # A kernel is launched if the GPU is known, if the arrays are whole or XLA's partitioner calls
    # our rule (a kernel is opaque to other partitioners), if the kernel takes the arrays, and if
    # Triton is installed.
    def on_cuda(ctx, *arrays, divided, **params):
        if kernel is None or kernel.launch is None:
            return default(ctx, *arrays, **params)
        at, whole = capability.of(ctx), capability.is_whole(ctx)
        possible = (
            at is not None
            and (whole or capability.calls_our_rule(ctx))
            and kernel.takes(*ctx.avals_in, **params)
        )
        if not (possible and capability.wants_kernels() and adapter.is_there()):
            return default(ctx, *arrays, **params)
        launch = functools.partial(kernel.launch, at, **params)
        if not whole:
            launch = partitioned(
                launch, kernel.rule(*ctx.avals_in, **params), capability.mesh_sizes(ctx)
            )
        return mlir.lower_fun(launch, multiple_results=True)(ctx, *arrays)

    # Remove with a fix: jax issue 38196. A TPU's kernel is opaque to XLA's partitioner, which calls
    # no rule there. The kernel runs if arrays are whole, or if their types show their shardings and
    # the kernel takes a TPU's part. Pallas takes a second to import, so it is imported when a
    # program for a TPU first needs a kernel.
    def on_tpu(ctx, *arrays, divided, **params):
        if not capability.wants_kernels():
            return default(ctx, *arrays, **params)
        choice = importlib.import_module("jaxmem_kernels.tpu.choice")

        choose = functools.partial(choice.launcher, reference.__name__)
        launch = choose(*ctx.avals_in, **params)
        if launch is not None and not capability.is_whole(ctx):
            launch = None
            rule = kernel.rule(*ctx.avals_in, **params) if kernel else None
            if rule and (typed := as_typed(rule, ctx.avals_in)) is not None:
                of_part = choose(*typed.parts, **params | rule.of_part(params, typed.parts))
                launch = of_part and typed.over(of_part)
        if launch is None:
            return default(ctx, *arrays, **params)
        # Pallas computes indices, and would mix integers of 64 bits and of 32 bits. Kernels
        # broadcast over ranks.
        with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
            return mlir.lower_fun(launch, multiple_results=True)(ctx, *arrays)

    # Outside of any trace, an operation is compiled separately.
    def now(*arrays, **params):
        with jax.disable_jit(False):  # with jit disabled, the primitive would call itself
            return compiled(hashable(params))(*arrays)

    hashable = lambda params: tuple(sorted(params.items(), key=lambda item: item[0]))
    default = mlir.lower_fun(results, multiple_results=True)
    primitive.def_impl(now)
    primitive.def_abstract_eval(
        lambda *avals, divided, **params: list(
            traced(avals, hashable(params), jax.sharding.get_abstract_mesh()).out_avals
        )
    )
    ad.primitive_jvps[primitive] = derivative
    batching.primitive_batchers[primitive] = mapped
    mlir.register_lowering(primitive, default)
    mlir.register_lowering(primitive, on_cuda, platform="cuda")
    mlir.register_lowering(primitive, on_tpu, platform="tpu")
    if kernel and kernel.launch is None:
        _without_gpu_kernel.add(primitive)
    _references[primitive] = lambda avals, params: traced(
        avals, hashable(params), jax.sharding.get_abstract_mesh()
    )

    @functools.wraps(reference)
    def public(*arrays, **params):
        found = primitive.bind(
            *arrays, divided=needs_devices() if capability.wants_devices() else None, **params
        )
        return tuple(found) if len(found) > 1 else found[0]

    public.__module__ = "jaxmem_kernels"
    return public

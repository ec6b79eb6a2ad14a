"""Exports a traced step as bytes that another process can compile: with flat arguments and results,
and with its shardings.
"""

import contextlib
import dataclasses

import jax
from jax import export

from jaxmem._trace.stand_in import without_python
from jaxmem.errors import StepError
from jaxmem_kernels import compiling_for
from jaxmem_kernels.gpu.adapter import CUSTOM_CALLS

# `jax.export` refuses custom calls that another JAX may not know. The process that compiles has the
# version that exports, so that these are safe.
_SAFE = (
    "annotate_device_placement",
    *CUSTOM_CALLS,
    "Sharding",
    "shape_assertion",
    "ALL",  # JAX's own word for every name, Pallas' kernels for GPUs included
)


class AlreadyTraced:
    """A jitted function whose trace exists. It has the methods of a `jax.stages.Wrapped` that
    `jax.export` and `jaxmem.plan` call.
    """

    def __init__(self, traced):
        self._traced = traced

    def trace(self, *_, **__):
        return self._traced

    def lower(self, *_, **__):
        return self._traced.lower()

    def __call__(self, *args, **kwargs):
        return self.lower().compile()(*args, **kwargs)


def export_flat(
    traced: jax.stages.Traced, platform: str, capability: int | None = None
) -> tuple[bytes, tuple[int, ...]]:
    """Serializes `traced` (from `jax.jit(f).trace(*args)`) for `platform`, such as "cuda".

    `capability`: the compute capability that kernels are for, such as 90.

    Returns the bytes of a `jax.export.Exported` whose arguments and results are flat tuples, so
    that no container of the step needs to be known elsewhere, and the flat indices of the donated
    arguments.

    Raises StepError for a call of Python that only the lowering of a library's primitive shows:
    `without_python` cannot leave it out.
    """
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in _SAFE]
    with compiling_for(capability) if capability else contextlib.nullcontext():
        lowered = export.export(
            AlreadyTraced(without_python(traced)), platforms=[platform], disabled_checks=checks
        )
        try:
            exported = lowered()
        except ValueError as error:  # JAX's, of a backend that is not there
            if "lowering platform" not in str(error):
                raise
            raise StepError(
                f"plan: a primitive of the step calls Python when it is lowered for {platform},"
                f" which this machine does not have ({error}); plan where the device is, or leave"
                " the check out: set EQX_ON_ERROR=nan for equinox and lineax"
            ) from error
    # The step's own containers may be registered in the user's code only. Tuples need no
    # registration. The second part of `in_tree` is the keyword arguments, and is empty.
    flat = dataclasses.replace(
        exported,
        in_tree=jax.tree.structure(((0,) * len(exported.in_avals), {})),
        out_tree=jax.tree.structure((0,) * len(exported.out_avals)),
    )
    donated = tuple(i for i, info in enumerate(jax.tree.leaves(traced.args_info)) if info.donated)
    return bytes(flat.serialize()), donated

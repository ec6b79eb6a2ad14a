"""A walk tells what a codec's kernel takes more than its reference, which XLA fuses."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import jaxmem_kernels
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem._trace.liveness.walk import runs_references, temporary_bytes

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults]
X = jax.ShapeDtypeStruct((512, 1024), jnp.float32)


def masked(x):
    """Packs which values are positive. A kernel reads a mask that was written; the reference's is
    written nowhere.
    """
    packed = jaxmem_kernels.pack_bits(x > 0, jnp.asarray(False), group=64)
    return packed


def walked(jaxpr, divided: bool) -> int:
    return 2 * temporary_bytes(jaxpr, (), on_gpu=True, shards=2, divided=divided)


def test_a_walk_tells_what_compiled_kernels_take_more_than_references():
    step = jax.jit(masked)
    with backend_for(Target.parse("h200")) as backend:
        with jaxmem_kernels.references():
            references = backend.compile_fully(None, step.trace(X)).result()
        jax.clear_caches()
        kernels = backend.compile_fully(None, step.trace(X)).result()
    more = kernels.total_bytes - references.total_bytes
    assert more == pytest.approx(X.size, rel=0.01), "a mask takes a byte a value"
    jaxpr = step.trace(X).jaxpr
    assert walked(jaxpr, divided=True) - walked(jaxpr, divided=False) == pytest.approx(
        more, rel=0.01
    )


def test_references_run_where_xla_divides_arrays_and_not_inside_shard_map():
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("data")
    mapped = jax.shard_map(masked, mesh=mesh, in_specs=rows, out_specs=rows)
    looped = lambda x: jax.lax.scan(lambda c, _: (c, masked(c)), x, length=2)[1]
    assert runs_references(jax.make_jaxpr(masked)(X))
    assert runs_references(jax.make_jaxpr(looped)(X))
    assert not runs_references(jax.make_jaxpr(mapped)(X))
    assert not runs_references(jax.make_jaxpr(lambda x: x > 0)(X))

"""Pieces that hold a `jax.shard_map` are priced on its mesh: their time is one device's."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxmem._core.actions import ALL
from jaxmem._core.assignment import Assignment
from jaxmem._core.database import Database, Timing
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import profile
from jaxmem._cost.profile.times import job_times
from jaxmem._cost.profile.unsharded import without_shardings
from jaxmem._target.compile.protocol import Pricing
from jaxmem._target.devices.target import Target
from jaxmem._trace.export import export_flat
from jaxmem._trace.jaxpr import as_function, equations, matmul_flops
from jaxmem._trace.job import Job
from jaxmem._trace.step import trace
from jaxmem._trace.vary import mapped_axes
from jaxmem.errors import JaxmemWarning
from tests.shared import mapped

AXES = {"data": 2, "fsdp": 2}
X = (jax.ShapeDtypeStruct(mapped.X, jnp.float32),)


def job(kind, **how):
    return Job(kind(mapped.mesh(), mapped.untagged, False, **how), X, AXES)


def test_a_job_tells_the_mesh_that_it_needs():
    plain = Job(jnp.sin, X, AXES)
    assert (plain.mesh, plain.shards) == (None, 1)
    assert len(plain.trace().jaxpr.in_avals) == 1
    for kind, shards in ((mapped.wholly, 4), (mapped.partly, 2), (mapped.by_tensor, 1)):
        assert (job(kind).mesh, job(kind).shards) == (mapped.mesh(), shards), kind
        assert len(job(kind).trace().jaxpr.in_avals) == 2, "a number on the mesh comes first"
    alone = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    one = Job(jax.shard_map(jnp.sin, mesh=alone, in_specs=P("data"), out_specs=P("data")), X, AXES)
    assert (one.mesh, one.shards) == (None, 1), "a mesh of one device is no mesh"


def test_a_job_from_inside_a_shard_map_is_run_inside_one_too():
    """Its arguments are those of one device of the mesh axes that are divided around it."""
    build = mapped.mapped_loss(mapped.mesh(), mapped.untagged)
    with jax.sharding.use_abstract_mesh(mapped.mesh()):
        step = without_shardings(jax.make_jaxpr(build(None))(*mapped.shapes(mapped.mesh())))
    loops = [e.params["jaxpr"] for e in equations(step.jaxpr) if e.primitive.name == "scan"]
    assert len(loops) == 2, "forward and backward"
    for layer in loops:
        part = Job(as_function(layer), tuple(v.aval for v in layer.jaxpr.invars), {"fsdp": 2})
        assert part.mesh.manual_axes == ("data",)
        (around,) = [m for e in part.trace().jaxpr.jaxpr.eqns if (m := mapped_axes(e))]
        assert {*around} == {"data"}
        exported, _ = export_flat(part.trace(), "cuda", 90)
        assert jax.export.deserialize(bytearray(exported)).nr_devices == 8


def test_flops_inside_are_those_of_all_devices():
    (eqn,) = job(mapped.wholly).jaxpr.jaxpr.eqns
    batch, sequence, width = mapped.X
    assert matmul_flops(eqn) == (2 * 2.0 * batch * sequence**2 * width, 2)


class Constant(Pricing):
    """Every piece takes a second where it runs."""

    source = "xla"

    def times(self, jobs):
        return [Timing(1.0) for _ in jobs]


def priced(kind, tmp_path, axes=AxisType.Auto):
    mesh = mapped.mesh(axes)
    with jax.sharding.use_abstract_mesh(mesh):
        build = mapped.build_with(kind, mesh)
        step = trace(build, Assignment.nothing(), mapped.shapes(mesh))[1]
    database = Database(tmp_path / "times.sqlite")
    backend = Constant(Target.parse("a100-80gb:8"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JaxmemWarning)
        made = profile(step.jaxpr, backend, Allowed(ALL, ALL), axes=AXES, database=database)
    return made.blocks[0]


@pytest.mark.quick(
    "wholly-1-AxisType.Auto",
    "ring-1-AxisType.Explicit",
    "by_tensor-4-AxisType.Explicit",
    "partly-2-AxisType.Auto",
)
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("kind", "share"),
    [(mapped.wholly, 1), (mapped.ring, 1), (mapped.partly, 2), (mapped.by_tensor, 4)],
)
def test_the_time_of_a_piece_on_a_mesh_is_not_divided_again(kind, share, axes, tmp_path):
    """`share`: over how many devices XLA, which is not told of them, would divide the batch."""
    held = priced(kind, tmp_path, axes)
    assert held.forward_seconds == pytest.approx(1 / share)
    assert held.backward_seconds == pytest.approx(1 / share)
    makes = {v: e for e in held.equations for v in e.outputs}
    before = {e.tag: makes[e.inputs[0]].seconds for e in held.equations if e.tag}
    assert before["q"] == pytest.approx(1 / 4), "this product alone runs on one device"
    assert 0 < before["probs"] < 1 / share, "a part of the piece"


def test_seconds_are_those_of_all_work(tmp_path):
    database = Database(tmp_path / "times.sqlite")
    jobs = [Job(jnp.sin, X, AXES), job(mapped.wholly), job(mapped.partly), job(mapped.by_tensor)]
    for _ in range(2):  # from the database the second time
        assert job_times(jobs, Constant(Target.parse("h200:8")), database).seconds == [1, 4, 2, 1]
    plain, mapped_whole = job_times(jobs[:2], Pricing(Target.parse("h200:8")), database).seconds
    assert plain <= mapped_whole, "a roofline counts the work of all devices"


KINDS = mapped.wholly, mapped.partly, mapped.by_tensor, mapped.summed, mapped.ring, mapped.ruled


@functools.cache
def pieces(kind, axes, check):
    """The step's program without shardings."""
    mesh = mapped.mesh(axes)
    with jax.sharding.use_abstract_mesh(mesh):
        build = mapped.build_with(kind, mesh, tag=mapped.untagged, check=check, own=True)
        return without_shardings(jax.make_jaxpr(build(None))(*mapped.shapes(mesh)))


@pytest.mark.quick("by_tensor", "ring")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_piece_needs_no_context_and_no_explicit_mesh(kind):
    every = itertools.product([AxisType.Auto, AxisType.Explicit], [False, True])
    for axes, check in every:
        made = pieces(kind, axes, check)
        meshes = [e.params["mesh"] for e in equations(made.jaxpr) if mapped_axes(e) is not None]
        assert len(meshes) >= 2, "forward and backward"
        assert {type(mesh) for mesh in meshes} == {AbstractMesh}
        assert AxisType.Explicit not in {k for mesh in meshes for k in mesh.axis_types}
        one = Job(as_function(made), tuple(v.aval for v in made.jaxpr.invars), AXES)
        with jax.set_mesh(None):
            exported, _ = export_flat(one.trace(), "cuda")
        assert jax.export.deserialize(bytearray(exported)).nr_devices == 8, (axes, check)


def test_a_mesh_loses_its_devices():
    """The piece is traced again where no mesh is set, the kernels inside too."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)

    def doubled(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    def inner(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        twice = pl.pallas_call(doubled, out_shape=shape, interpret=True)(x)
        return jax.nn.softmax(jnp.maximum(twice, 0.5))

    one = jax.shard_map(inner, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    with jax.set_mesh(mesh):
        made = without_shardings(jax.make_jaxpr(one)(x))
    (eqn,) = [e for e in made.jaxpr.eqns if mapped_axes(e) is not None]
    assert eqn.params["mesh"] == mesh.abstract_mesh
    with jax.set_mesh(None):
        traced = Job(as_function(made), (x,)).jaxpr
        assert [e.primitive.name for e in equations(traced.jaxpr)].count("pallas_call") == 1
        got = jax.jit(as_function(traced))(jnp.ones(x.shape))
    np.testing.assert_allclose(got[0], np.full(x.shape, 1 / 128), rtol=1e-6)

"""Times are measured once, and again where the machine was busy or they are old; the less disturbed
measurement is kept. A lossy codec must gain more than the times are known to, and nothing where it
is explicitly asked for. The time of a piece that holds a `jax.shard_map` is the
time of one device of its mesh.
"""

import dataclasses
import functools
import itertools
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxmem._core.actions import ALL, KEEP, Action, Choice
from jaxmem._core.assignment import Assignment
from jaxmem._core.database import Database, Timing
from jaxmem._core.profile import Option
from jaxmem._cost.profile.doubt import MIN_GAIN_REQUESTED, with_doubts
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import profile
from jaxmem._cost.profile.times import (
    BUSY,
    CEILING,
    ESTIMATED,
    OLD_SECONDS,
    RETRY_SECONDS,
    job_times,
)
from jaxmem._cost.profile.unsharded import without_shardings
from jaxmem._target.compile.backend import Local
from jaxmem._target.compile.protocol import Pricing
from jaxmem._target.compile.timing import INDICES, measure_all, sample
from jaxmem._target.devices.target import Target
from jaxmem._trace.export import export_flat
from jaxmem._trace.jaxpr import as_function, equations, matmul_flops
from jaxmem._trace.job import Job
from jaxmem._trace.step import trace
from jaxmem._trace.vary import mapped_axes
from jaxmem.errors import JaxmemWarning
from tests.shared import mapped, models
from tests.shared.profiles import block

QUIET, DISTURBED = BUSY / 2, 2 * BUSY


def job(size: int) -> Job:
    return Job(lambda x: x * 2, (jax.ShapeDtypeStruct((size,), jnp.float32),))


class Machine(Pricing):
    """Measures what it is told to, and counts how often it was asked."""

    source = "measured"

    def __init__(self, seconds=1.0, spread=0.0):
        super().__init__(Target.parse("local"))
        self.asked, self.answer = [], Timing(seconds, spread)

    def times(self, jobs):
        self.asked.append(len(jobs))
        return [self.answer] * len(jobs)


class Estimates(Machine):
    source = "xla"


@pytest.fixture
def clock(monkeypatch):
    now = [1e9]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


@pytest.fixture
def measured(tmp_path, clock):
    """Answers with seconds, and how many jobs were measured for them, `later` than before."""
    machine, jobs = Machine(), [job(3), job(4), job(3)]

    def again(seconds: float, spread: float, later: float = 0.0, **how):
        clock[0] += later
        machine.asked, machine.answer = [], Timing(seconds, spread)
        found = job_times(jobs, machine, Database(tmp_path / "profile.sqlite", **how))
        assert len(found.seconds) == 3
        assert len(set(found.seconds)) == 1
        return found.seconds[0], sum(machine.asked), found.disturbed

    return again


def test_no_row_of_a_table_is_read_by_most_of_the_indices_that_are_made_up():
    tokens = sample(jax.ShapeDtypeStruct((8, 1024), jnp.uint16))
    assert tokens.dtype == jnp.uint16
    counts = np.bincount(np.asarray(tokens).ravel())
    assert len(counts) == INDICES
    assert counts.max() - counts.min() <= 1
    few, flags = jax.ShapeDtypeStruct((7,), jnp.int32), jax.ShapeDtypeStruct((2048,), jnp.bool_)
    # Bounds of loops, sizes of groups and masks remain 0.
    assert not np.asarray(sample(few)).any()
    assert not np.asarray(sample(flags)).any()


def test_a_quiet_time_is_measured_once(measured):
    assert measured(5.0, QUIET) == (5.0, 2, 0.0)
    assert measured(9.0, QUIET) == (5.0, 0, 0.0)
    assert measured(9.0, QUIET, later=OLD_SECONDS - 1) == (5.0, 0, 0.0)


def test_a_busy_time_is_measured_again_after_a_while(measured):
    assert measured(5.0, DISTURBED) == (5.0, 2, 1.0)
    assert measured(4.0, QUIET, later=RETRY_SECONDS - 1) == (5.0, 0, 1.0)
    assert measured(4.0, QUIET, later=2) == (4.0, 2, 0.0)
    assert measured(3.0, QUIET, later=RETRY_SECONDS + 1) == (4.0, 0, 0.0)


def test_of_busy_times_the_least_is_kept_and_stays_doubtful(measured):
    assert measured(5.0, DISTURBED)[0] == 5.0
    assert measured(8.0, DISTURBED, later=RETRY_SECONDS + 1) == (5.0, 2, 1.0)
    assert measured(4.0, DISTURBED, later=RETRY_SECONDS + 1) == (4.0, 2, 1.0)
    assert measured(6.0, QUIET, later=RETRY_SECONDS + 1) == (6.0, 2, 0.0)


def test_an_old_time_is_measured_again(measured):
    assert measured(5.0, QUIET)[0] == 5.0
    assert measured(7.0, QUIET, later=OLD_SECONDS + 1) == (7.0, 2, 0.0), "the machine has changed"
    assert measured(9.0, DISTURBED, later=OLD_SECONDS + 1) == (7.0, 2, 1.0), "or was busy now"
    assert measured(9.0, QUIET, later=1) == (7.0, 0, 1.0)
    assert measured(8.0, QUIET, later=RETRY_SECONDS + 1) == (8.0, 2, 0.0)


def test_a_time_of_the_future_is_old(measured):
    assert measured(5.0, QUIET)[0] == 5.0
    assert measured(6.0, QUIET, later=-2 * OLD_SECONDS) == (6.0, 2, 0.0)


def test_what_is_not_to_be_read_is_measured_and_written_anew(measured, clock):
    assert measured(5.0, QUIET)[0] == 5.0
    start = clock[0] + 1
    assert measured(6.0, DISTURBED, later=1, since=start) == (6.0, 2, 1.0)
    assert measured(7.0, QUIET, later=1, since=start) == (6.0, 0, 1.0), "not within one plan"
    assert measured(7.0, QUIET, later=1)[0] == 6.0


def test_estimates_do_not_age(measured, monkeypatch):
    monkeypatch.setattr(Machine, "source", "xla")
    assert measured(5.0, 0.0)[0] == 5.0
    assert measured(6.0, 0.0, later=2 * OLD_SECONDS) == (5.0, 0, 0.0)


def test_a_machine_is_measured_with_the_spread_of_most_jobs(monkeypatch):
    rounds = iter([[2.0, 2.0, 2.2], [1.0, 1.3, 1.6], [4.0, 8.0, 9.0]])
    monkeypatch.setattr("jaxmem._target.compile.timing.measure", lambda _: next(rounds))
    found = measure_all([job(3), job(4), job(5)])
    assert [timing.seconds for timing in found] == [2.0, 1.0, 4.0]
    assert [timing.spread for timing in found] == pytest.approx([0.3, 0.3, 0.3])
    assert measure_all([]) == []


def test_the_machine_at_hand_is_measured(tmp_path, measured_times):
    backend = Local(Target.parse("local"))
    found = job_times([job(2**16), job(2**4)], backend, Database(tmp_path / "profile.sqlite"))
    assert found.source == "measured"
    assert all(0 < seconds < 60 for seconds in found.seconds)
    again = job_times([job(2**16)], backend, Database(tmp_path / "profile.sqlite"))
    assert again.seconds == found.seconds[:1]


def test_a_job_that_cannot_be_timed_gets_its_roofline_scaled_by_the_others(tmp_path):
    machine, database = Machine(), Database(tmp_path / "p.sqlite")
    jobs = [job(n) for n in (4096, 2048, 1024, 2048)]
    for _ in range(2):  # what was timed is in the database the second time
        machine.times = lambda those: [None if j is jobs[-1] else Timing(5.0, 0.1) for j in those]
        found = job_times(jobs, machine, database)
        # The rooflines are as 4 to 2 to 1: 10 seconds for 5 parts of 7.
        assert found.seconds == pytest.approx([5.0, 4.0, 5.0, 4.0])
        assert (found.source, found.disturbed) == ("measured", 0.0)
        assert found.uncertainty == pytest.approx(0.1)
    machine.times = lambda those: [Timing(3.0)] * len(those)
    assert job_times(jobs, machine, database).seconds == [5.0, 3.0, 5.0, 3.0]


def test_of_jobs_that_cannot_be_timed_all_get_their_roofline(tmp_path):
    machine, jobs = Machine(), [job(4096), job(2048)]
    machine.times = lambda those: [None] * len(those)
    found = job_times(jobs, machine, Database(tmp_path / "p.sqlite"))
    assert found == job_times(jobs, Pricing(machine.target))
    assert found.source == "roofline"
    assert job_times([], machine, Database(tmp_path / "p.sqlite")).source == "measured"


LOSSY, BITS = (
    Choice("compress", codec)
    for codec in ("grouped_symmetric(group=64,scale=bfloat16)", "bit_mask()")
)


def tagged(options, runs=1):
    chain = [([0], [1], 1.0, None), ([1], [2], 0.0, "u")]
    made = block(chain, [2], [5, 20, 20], {"u": [Option(c, 1, 0, s) for c, s in options]})
    return dataclasses.replace(made, runs=runs)


def doubts(blocks, *told) -> list[dict]:
    return [{o.choice: o.doubt for o in b.tags[0].options} for b in with_doubts(blocks, *told)]


def test_the_share_of_the_step_is_that_of_a_label():
    made = [tagged([(KEEP, 3.0), (LOSSY, 2.0)], runs) for runs in (1, 7)]
    assert sum(b.runs * found[LOSSY] for b, found in zip(made, doubts(made, 0.0, 50.0))) == (
        pytest.approx(MIN_GAIN_REQUESTED * 50.0)
    )


def profiled(backend, tmp_path, actions=ALL):
    build = models.build_with(functools.partial(models.scanned, block=models.narrow))
    jaxpr = trace(build, Assignment.nothing(), models.shapes(2, 64, 2, 64))[1].jaxpr
    return profile(jaxpr, backend, Allowed(actions), database=Database(tmp_path / "p.sqlite"))


@pytest.mark.parametrize(
    ("backend", "uncertainty"),
    [
        (Machine(1e-3, 0.07), 0.07),
        (Machine(1e-3, 0.6), 0.6),
        (Estimates(1e-3), ESTIMATED),
        (Pricing(Target.parse("h200")), CEILING),
    ],
    ids=["quiet", "busy", "xla", "roofline"],
)
def test_times_are_as_uncertain_as_they_were_measured(backend, uncertainty, tmp_path):
    made = profiled(backend, tmp_path)
    assert made.uncertainty == pytest.approx(uncertainty)
    (block,) = made.blocks
    for tag in block.tags:
        for option in tag.options:
            lossy = option.choice.codec not in (None, BITS.codec)
            expected = (
                uncertainty * option.seconds + MIN_GAIN_REQUESTED * made.step_seconds / block.runs
            )
            assert option.doubt == pytest.approx(expected if lossy else 0.0)
    assert {bool(o.doubt) for t in block.tags for o in t.options} == {True, False}


def test_the_median_spread_counts(tmp_path):
    machine, spreads = Machine(), iter((0.1, 0.9, 0.2))
    machine.times = lambda jobs: [Timing(1.0, next(spreads)) for _ in jobs]
    jobs = [Job(lambda x: x * 2, (jax.ShapeDtypeStruct((n,), jnp.float32),)) for n in (3, 4, 5)]
    found = job_times(jobs, machine, Database(tmp_path / "p.sqlite"))
    assert found.uncertainty == pytest.approx(0.2)


def test_codecs_that_are_asked_for_alone_are_not_doubted_in_a_profile(tmp_path):
    made = profiled(Machine(1e-3, 0.6), tmp_path, (Action.COMPRESS, Action.RECOMPUTE))
    options = [o for b in made.blocks for t in b.tags for o in t.options]
    assert options
    assert {o.doubt for o in options} == {0.0}


AXES = {"data": 2, "fsdp": 2}
X = (jax.ShapeDtypeStruct(mapped.X, jnp.float32),)


def mapped_job(kind, **how):
    return Job(kind(mapped.mesh(), mapped.untagged, False, **how), X, AXES)


def test_a_job_tells_the_mesh_that_it_needs():
    plain = Job(jnp.sin, X, AXES)
    assert (plain.mesh, plain.shards) == (None, 1)
    assert len(plain.trace().jaxpr.in_avals) == 1
    for kind, shards in ((mapped.wholly, 4), (mapped.partly, 2), (mapped.by_tensor, 1)):
        assert (mapped_job(kind).mesh, mapped_job(kind).shards) == (mapped.mesh(), shards), kind
        assert len(mapped_job(kind).trace().jaxpr.in_avals) == 2, "a number on the mesh comes first"
    alone = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    one = Job(jax.shard_map(jnp.sin, mesh=alone, in_specs=P("data"), out_specs=P("data")), X, AXES)
    assert (one.mesh, one.shards) == (None, 1), "a mesh of one device is no mesh"


def test_a_job_from_inside_a_shard_map_is_run_inside_one_too():
    """The job has the arguments of one device of the mesh axes that the shard_map divides."""
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
    (eqn,) = mapped_job(mapped.wholly).jaxpr.jaxpr.eqns
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
    kinds = mapped.wholly, mapped.partly, mapped.by_tensor
    jobs = [Job(jnp.sin, X, AXES), *map(mapped_job, kinds)]
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


def test_a_number_of_a_branch_keeps_its_dtype():
    """`jnp.clip` has numbers of JAX's own type, whose values NumPy reads as int64."""
    clipped = lambda x: jax.lax.cond(x[0] > 0, lambda h: jnp.clip(h, -1, 1), lambda h: 2 * h, x)
    bare = without_shardings(jax.make_jaxpr(clipped)(jnp.ones(4, jnp.float32)))
    for x in (jnp.full(4, 3.0, jnp.float32), jnp.full(4, -3.0, jnp.float32)):
        (found,) = jax.jit(as_function(bare))(x)
        np.testing.assert_array_equal(found, clipped(x))


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

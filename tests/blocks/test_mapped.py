"""Tags inside a `jax.shard_map` of a block are decided, with the bytes of one device. Gradients
under plans for such tags are those without a checkpoint, on eight devices in their own process.
"""

import functools
import itertools
import math
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from jaxmem._core.actions import ALL, UNTAGGED, Action
from jaxmem._core.assignment import Assignment
from jaxmem._cost.blocks.classes import plan_fingerprint
from jaxmem._cost.blocks.find import find_blocks
from jaxmem._cost.blocks.opened_block import open_block
from jaxmem._cost.blocks.segments import graph_of
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import block_classes, profile
from jaxmem._planner.solve.cost import evaluate
from jaxmem._target.compile.protocol import Pricing
from jaxmem._target.devices.target import Target
from jaxmem._trace.arguments import batch_axes
from jaxmem._trace.step import trace
from jaxmem.errors import JaxmemWarning
from tests.shared import children, mapped, occurrences
from tests.shared.audit import audit

pytestmark = pytest.mark.jax_defaults
KINDS = mapped.wholly, mapped.partly, mapped.by_tensor, mapped.summed, mapped.ring, mapped.ruled
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
BATCH, SEQUENCE, WIDTH = mapped.X
# Bytes of one layer on one device, of a batch that four of the eight devices divide.
ROW = BATCH * SEQUENCE * WIDTH * 4 // 4
SQUARE = BATCH * SEQUENCE * SEQUENCE * 4 // 4
BYTES = {
    mapped.wholly: {"probs": SQUARE, "ctx": ROW // 2},
    mapped.partly: {"probs": SQUARE, "ctx": ROW},
    mapped.by_tensor: {"probs": SQUARE, "ctx": ROW // 2},
    mapped.summed: {"probs": SQUARE, "ctx": ROW // 2},
    mapped.ring: {"probs": SQUARE // 2, "ctx": ROW // 2},  # two turns, each of a quarter
    mapped.ruled: {"probs": SQUARE, "ctx": ROW // 2},
}
LIMIT = Pricing(Target.parse("a100-80gb:8"))


def traced(kind, choices, axes=AxisType.Auto, check=False):
    mesh = mapped.mesh(axes)
    build = mapped.build_with(kind, mesh, check=check)
    with jax.sharding.use_abstract_mesh(mesh):
        return trace(build, Assignment({"block": choices}), mapped.shapes(mesh))[1]


@functools.cache
def profiled(kind, axes=AxisType.Auto, check=False):
    step = traced(kind, {}, axes, check)
    divided = batch_axes(step, mapped.shapes(mapped.mesh(axes)), 8)
    assert divided == {"data": 2, "fsdp": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JaxmemWarning)
        return profile(step.jaxpr, LIMIT, Allowed(ALL, ALL), axes=divided)


@pytest.mark.quick(
    "AxisType.Auto-False-by_tensor",
    "AxisType.Auto-True-ring",
    "AxisType.Explicit-True-partly",
    "AxisType.Explicit-False-wholly",
    "AxisType.Auto-False-summed",
    "AxisType.Explicit-True-ruled",
)
@each_kind
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_a_tag_has_the_bytes_of_one_device(kind, axes, check):
    (held,) = profiled(kind, axes, check).blocks
    assert {t.name for t in held.tags} == {"q", "probs", "ctx", "up"}
    outside = {"q": ROW, "up": 2 * ROW}
    for name, size in (outside | BYTES[kind]).items():
        assert held.tag_bytes(name) == size, name
        (tag,) = held.occurrences(name)
        kept = [o.device_bytes for o in tag.options if o.choice.action is Action.KEEP]
        assert kept == [size], name
        # A plan's table and messages compute bytes from shapes.
        whole = tag.turns * math.prod(tag.shape) * jnp.dtype(tag.dtype).itemsize
        assert whole == size * tag.shards, name
    assert held.shards == 4


@each_kind
def test_a_compressed_tag_has_the_bytes_of_its_codes_on_one_device(kind):
    (held,) = profiled(kind).blocks
    (tag,) = held.occurrences("ctx")
    (option,) = [o for o in tag.options if o.choice.action is Action.COMPRESS]
    assert 0.13 < option.device_bytes / BYTES[kind]["ctx"] < 0.26
    host = [o.host_bytes for o in tag.options if o.choice.action is Action.OFFLOAD]
    assert host == [BYTES[kind]["ctx"]]


@pytest.mark.quick("by_tensor", "ring")
@each_kind
def test_what_is_predicted_is_what_is_traced(kind):
    """Matrix products, and bytes inside: JAX returns what is saved there with a part for each of
    the devices that run it, along the axes that are manual.
    """
    made = profiled(kind)
    (held,) = made.blocks
    alone = audit(traced(kind, {UNTAGGED: "keep"})).matmuls
    nothing = evaluate(made, {"block": {}})
    traced_nothing = audit(traced(kind, {}))
    parts = {mapped.partly: 2 * 2, mapped.by_tensor: 2 * 4}.get(
        kind, 8
    )  # those of XLA's division too
    for choices in occurrences.assignments(held):
        inside = {name: c for name, c in choices.items() if name in ("probs", "ctx")}
        predicted, found = evaluate(made, {"block": inside}), audit(traced(kind, inside))
        again = sum(b.runs * c.matmuls for b, c in zip(made.blocks, predicted.blocks))
        assert found.matmuls - alone == again, inside
        for of in ("saved_bytes", "host_bytes"):
            more = getattr(found, of) - getattr(traced_nothing, of)
            assert more == parts * (getattr(predicted, of) - getattr(nothing, of)), (of, inside)


@each_kind
def test_flops_are_those_of_one_device(kind):
    """Half of them where the axis tensor divides the work inside."""
    graph = graph_of(find_blocks(traced(kind, {}).jaxpr.jaxpr).instances[0])
    shut = sum(o.flops for o in open_block(graph, axes={"data": 2, "fsdp": 2}).operations)
    (held,) = profiled(kind).blocks
    assert sum(e.flops for e in held.equations) == pytest.approx(shut / 4)


def test_a_fingerprint_does_not_depend_on_devices():
    step = traced(mapped.wholly, {})
    one, four = (block_classes(step.jaxpr, axes) for axes in ({}, {"data": 2, "fsdp": 2}))
    assert one != four

    assert plan_fingerprint(one) == plan_fingerprint(four) == profiled(mapped.wholly).fingerprint


def test_a_tag_that_is_not_decided_is_told_with_its_bytes():
    def branching(mesh, tag, check):
        def inside(x, tag):
            hidden = lambda x: jnp.sin(tag(jnp.sin(x), "hidden"))
            return jax.lax.cond(x.sum() > 0, hidden, jnp.cos, x)

        return mapped.inside(mesh, inside, tag, mapped.PARTS, check)

    step = traced(branching, {})
    size = ROW // 2 // 1024
    with pytest.warns(JaxmemWarning, match=rf"tags 'hidden' \({size}.0 KiB a layer\) of block"):
        made = profile(step.jaxpr, LIMIT, Allowed(ALL, ALL), axes={"data": 2, "fsdp": 2})
    assert {t.name for t in made.blocks[0].tags} == {"q", "up"}


EXACT = "keep", "recompute", "offload", "loop", "auto"
NAMES = "wholly", "partly", "by_tensor", "summed", "ring", "ruled"


def errors(*names) -> dict[str, dict[str, float]]:
    found = children.printed(children.with_cpus(8), "tests.programs.mapped_gradients", *names)
    assert set(found) == set(names)
    return found


def check(found):
    for name, of_plan in found.items():
        exact = {plan: of_plan[plan] for plan in EXACT}
        assert exact == pytest.approx(dict.fromkeys(EXACT, 0.0), abs=1e-10), name
        # A codec in the place of the tensor changes the gradient, and not by much.
        assert 1e-4 < of_plan["compress"] < 0.5, name


def test_gradients_are_those_without_a_checkpoint():
    check(errors("wholly:Auto:unchecked"))


@pytest.mark.slow
def test_gradients_in_every_other_way():
    every = itertools.product(NAMES, ("Auto", "Explicit"), ("checked", "unchecked"))
    check(errors(*(":".join(one) for one in every)))

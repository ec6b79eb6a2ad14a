"""Layers that a Python loop repeats, divided over GPUs: XLA's schedule holds gathered weights of
many layers at once, and the plan says so.
"""

import functools
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem._core.bytes import show_bytes
from jaxmem._planner.advice import HELD, held_by_schedule
from jaxmem._target.devices.target import Target
from jaxmem.errors import JaxmemWarning
from jaxmem.plans import Assignment

pytestmark = pytest.mark.jax_defaults

LAYERS, WIDTH, ROWS, DEVICES = 8, 1024, 8192, 8
MESH = AbstractMesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))


def build(plan, stacked=False):
    """Returns a step whose layers are a list, or in a scan. Each device stores an eighth of each
    weight.
    """

    def layer(h, w):
        return h + jax.nn.relu(jaxmem.tag(h @ w[0], "up")) @ w[1], None

    run = jax.checkpoint(layer, policy=jaxmem.remat_policy(plan), prevent_cse=not stacked)

    def loss(ws, x):
        h = x
        if stacked:
            h, _ = jax.lax.scan(run, x, ws)
        else:
            for w in ws:
                h, _ = run(h, w)
        return (h.astype(jnp.float32) ** 2).mean()

    return lambda ws, x: jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))


def arguments(stacked: bool):
    def weight(*sizes):
        spec = P(None, "data") if stacked else P("data")
        sizes = (LAYERS, *sizes) if stacked else sizes
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(MESH, spec))

    one = weight(WIDTH, 4 * WIDTH), weight(4 * WIDTH, WIDTH)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=NamedSharding(MESH, P("data")))
    return (one if stacked else [one] * LAYERS), x


@pytest.mark.slow
def test_the_schedule_of_unrolled_layers_is_named_and_a_scan_takes_half():
    def price(stacked):
        made = functools.partial(build, stacked=stacked), Assignment.nothing(), *arguments(stacked)
        return jaxmem.plans.price(*made, target=f"h200:{DEVICES}")

    with pytest.warns(JaxmemWarning, match="unrolled in Python"):  # for offload
        unrolled = price(False)
    in_a_scan = price(True)
    said = lambda plan: [note for note in plan.notes if "follow each other without a loop" in note]
    assert said(unrolled)
    assert not said(in_a_scan)
    temporaries = lambda plan: plan.compiled_bytes - plan.parts.arguments
    assert temporaries(unrolled) > HELD * temporaries(in_a_scan)


@pytest.mark.core
@pytest.mark.parametrize(
    ("held", "expected", "unrolled", "target", "said"),
    [
        (162, 33, ("block",), "h200:8", True),  # as measured on the step above
        (68, 57, (), "h200:8", False),
        (210, 166, ("block",), "h200:8", False),
        (264, 264, ("block",), "h200", False),
        (290_000, 62_000, ("block",), "h200:8", True),  # openxla/xla #45753
        (290_000, 62_000, (), "h200:8", False),
        (162, 33, ("block",), "v5e:8", False),
        (162, None, ("block",), "h200:8", False),
    ],
)
def test_the_note_names_the_bytes_and_the_remedies(held, expected, unrolled, target, said):
    size = None if expected is None else expected * 2**20
    stub = types.SimpleNamespace
    search = stub(
        profile=stub(unrolled=unrolled),
        compiler=stub(backend=stub(target=Target.parse(target))),
        estimates=stub(estimate=lambda actions: size),
    )
    trial = stub(actions={}, step=stub(compiled=stub(temp_bytes=held * 2**20)))
    notes = held_by_schedule(search, trial)  # pyright: ignore[reportArgumentType]
    assert len(notes) == said
    for note in notes:
        assert show_bytes(held * 2**20) in note
        assert show_bytes(size) in note
        assert "jax.lax.scan" in note
        assert "latency_hiding_scheduler=false" in note

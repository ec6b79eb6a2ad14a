"""Options that XLA is asked with: copies of loops and of arguments run beside work, on every kind
of GPU. Options of a released step that is divided over devices, without a plan.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._model.states.store import counted, fetch
from jaxmem._target.compile.options import GRAPHED, HIDING, WITHOUT_COPIES, options_of
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._trace.export import export_flat
from jaxmem.plans import Assignment, compiler_options
from tests.shared import meshes, tiny_lm

LAYERS, WIDTH = 6, 1024
HOST = jax.memory.Space.Host


def shape(*sizes, kind="device"):
    mesh = meshes.abstract(1)
    sharding = jax.sharding.NamedSharding(mesh, meshes.WHOLE, memory_kind=kind)
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=sharding)


def through(stack, x):
    """Layers whose weights lie anywhere, each fetched when its turn comes."""
    layer = lambda x, i, _: (jnp.tanh(x @ fetch(stack, i)), None)
    return counted(layer, x, None, 0, LAYERS)[0]


COPIES = {HIDING: True, GRAPHED: WITHOUT_COPIES}


def traced(function, *args):
    return jax.jit(function).trace(*args)


def test_copies_in_loops_and_of_arguments_ask_for_the_scheduler_that_hides_them(monkeypatch):
    x, near = shape(WIDTH, WIDTH), shape(LAYERS, WIDTH, WIDTH)
    far = shape(LAYERS, WIDTH, WIDTH, kind="pinned_host")
    asked = traced(through, far, x)
    assert options_of("cuda", asked) == COPIES
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"--{GRAPHED}=")  # the user wants no graphs
        assert options_of("cuda", asked) == {HIDING: True}
    assert options_of("cpu", asked) == {}
    assert options_of("cuda", traced(through, near, x)) == {}
    once = lambda w, x: x @ jax.device_put(w, jax.memory.Space.Device)
    assert options_of("cuda", traced(once, shape(WIDTH, WIDTH, kind="pinned_host"), x)) == COPIES
    # With the scheduler, XLA would keep such a tensor of an unrolled layer on the device.
    offloaded = lambda x: jax.device_put(jax.device_put(x, HOST), jax.memory.Space.Device) @ x
    assert options_of("cuda", traced(offloaded, x)) == {}


def test_loops_that_gather_what_they_multiply_ask_for_it_too():
    mesh, whole = meshes.abstract(4), meshes.WHOLE
    spec = jax.sharding.PartitionSpec(None, "data")
    gather = lambda w: jax.lax.all_gather(w, "data", axis=0, tiled=True)

    def over(layer):
        loop = lambda ws, x: jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]
        mapped = jax.shard_map(
            loop, mesh=mesh, in_specs=(spec, whole), out_specs=whole, check_vma=False
        )
        args = (LAYERS, WIDTH, WIDTH), (WIDTH, WIDTH)
        shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in args]
        return jax.jit(mapped).trace(*shapes)

    assert options_of("cuda", over(lambda x, w: x @ gather(w))) == {HIDING: True}
    assert options_of("cuda", over(lambda x, w: x + gather(w))) == {}, "there is nothing beside"


def test_what_a_loop_stacks_in_host_memory_counts_inside_of_other_loops_too():
    def offloads(xs):
        one = lambda c, x: (c @ x, jax.device_put(c, HOST))
        outer = lambda c, _: (jax.lax.scan(one, c, xs)[0], None)
        return jax.lax.scan(outer, xs[0], None, length=2)[0]

    xs = shape(LAYERS, WIDTH, WIDTH)
    stacked = lambda xs: jax.lax.scan(lambda c, x: (c @ x, jax.device_put(c, HOST)), xs[0], xs)
    assert options_of("cuda", traced(stacked, xs)) == COPIES
    assert options_of("cuda", traced(offloads, xs)) == COPIES


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jaxlib reads such stacks wrongly")
@pytest.mark.parametrize(("target", "hides_unasked"), [("a100-80gb", False), ("h200", True)])
def test_with_them_a_layer_is_fetched_beside_products_on_every_gpu(target, hides_unasked):
    far = shape(LAYERS, WIDTH, WIDTH, kind="pinned_host")

    def ahead(stack, x):
        def layer(carry, i, _):
            x, w = carry
            return (jnp.tanh(jnp.tanh(x @ w) @ w), fetch(stack, i + 1)), None

        return counted(layer, (x, fetch(stack, 0)), None, 0, LAYERS)[0]

    step = traced(ahead, far, shape(WIDTH, WIDTH))
    exported, donated = export_flat(step, "cuda")
    with Compiler(target, workers=1) as compiler:
        beside = []
        for options in ({}, options_of("cuda", step)):
            compiled = compiler.submit(exported, donated=donated, options=options).result()
            assert compiled.options == options
            fetched = [t for t in compiled.transfers if t.in_loop and not t.to_host]
            assert fetched
            beside.append(all(t.products for t in fetched))
    assert beside == [hides_unasked, True]


DEVICES, STACK = 4, 4


@pytest.mark.parametrize(
    ("divided", "persist", "expected"),
    [("moments", STACK, {}), ("states", STACK, {}), ("layers", STACK, {HIDING: True})]
    + [("layers", 1, COPIES)],  # the other layers' states are in host memory
)
def test_loops_that_gather_layers_ask_for_the_scheduler_of_resident_states_too(
    divided, persist, expected
):
    mesh = meshes.abstract(DEVICES)
    tx = jaxmem.adama(1e-3, axis_name="data")
    step = tiny_lm.released(tx, plan=Assignment({"block": {}}))
    params = tiny_lm.parameters(np.float32, layers=STACK, width=16)
    state = step.split(meshes.state(step, params, mesh, divided, meshes.shape), persist)
    rows = jax.ShapeDtypeStruct((2 * DEVICES, 6), jnp.int32)
    args = state, meshes.shape(rows, mesh, jax.sharding.PartitionSpec("data"))
    target = f"a100-80gb:{DEVICES}"
    found = compiler_options(step.data_parallel(mesh, divided), *args, target=target)
    assert found == expected

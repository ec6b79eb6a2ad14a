"""What JAX and XLA do today that streamed states are built around. Where one of these tests fails,
a newer release does otherwise, and its message says what may then be made simpler.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from jaxmem._model.states.store import after, counted, fetch, put
from jaxmem._target.hlo.transfers import fault
from jaxmem._trace.arguments import on_host
from tests.released.test_streamed_deviceless import STACK, X
from tests.shared import children
from tests.shared.deviceless import result

LAYERS, WIDTH, _ = STACK.shape


LAYER = 4 * WIDTH * WIDTH  # bytes
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)


def replacing(of_carry=True, ordered=True):
    """Updates layers from the last to the first, and fetches the next layer ahead, from the carry
    or from outside. ordered: whether the fetch comes before the store.
    """

    def step(stack, x):
        def body(carry, i, _):
            new, x, layer = carry
            following = fetch(new if of_carry else stack, i - 1)
            x = jnp.tanh(x @ layer)
            made = after(layer + x.T @ x, [following] if ordered else [])
            return (put(new, made, i), x, following), None

        first = stack, x, fetch(stack, LAYERS - 1)
        return counted(body, first, None, 0, LAYERS, reverse=True)[0][:2]

    return step


def test_what_is_updated_is_held_twice_unless_it_is_read_from_the_carry_before_the_store(h200):
    carried = result(h200, replacing(), STACK, X, donate=0)
    assert carried.host_bytes == LAYERS * LAYER
    assert fault(carried.transfers) is None
    for how, simpler in (
        ({"of_carry": False}, "parameters need not be read from the carry"),
        ({"ordered": False}, "a fetch need not be ordered before the store"),
    ):
        twice = result(h200, replacing(**how), STACK, X, donate=0)
        assert twice.host_bytes >= 2 * LAYERS * LAYER, (
            "XLA no longer holds twice what a loop replaces: in `backward` of"
            f" jaxmem/_optim/released/backward.py {simpler}"
        )
        assert "within host memory" in fault(twice.transfers)


def folding(barred: bool):
    """Folds each layer's gradient, behind a barrier of its own or of it and the index."""

    def step(moments, w, x):
        def body(carry, i, _):
            moments, x = carry
            x = jnp.tanh(x @ w)
            at, g = i, x.T @ x
            if barred:
                at, g = jax.lax.optimization_barrier((i, g))
            else:
                (g,) = jax.lax.optimization_barrier((g,))
            return (put(moments, 0.9 * fetch(moments, at) + 0.1 * g, at), x), None

        return counted(body, (moments, x), None, 0, LAYERS, reverse=True)[0]

    return step


def test_an_index_behind_the_gradients_barrier_is_no_counter(h200):
    of_gradient = result(h200, folding(False), STACK, W, X, donate=0)
    assert fault(of_gradient.transfers) is None
    fetches = [t for t in of_gradient.transfers if t.in_loop and not t.to_host]
    assert fetches
    assert all(t.products for t in fetches)
    of_both = result(h200, folding(True), STACK, W, X, donate=0)
    assert "kernels in loops" in (fault(of_both.transfers) or ""), (
        "XLA knows a loop's index behind a barrier: `folded_at` of jaxmem/_model/loop/stack.py may"
        " bar the whole fold"
    )
    assert not any(t.products for t in of_both.transfers if t.in_loop)


UNPINNED = """
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxmem._model.states.store import counted, fetch, put
import sys
mesh = Mesh(jax.devices(), ("data",))
there = NamedSharding(mesh, PartitionSpec(), memory_kind=sys.argv[1])
def step(stack, x):
    body = lambda carry, i, _: ((put(carry[0], fetch(carry[0], i) + x, i), carry[1]), None)
    return counted(body, (stack, x), None, 0, 3)[0]
stack = jax.device_put(jnp.ones((3, 4)), there)
stack, _ = jax.jit(step, donate_argnums=0)(stack, jnp.ones(4))
print(float(stack.sum()))
"""


def test_memory_that_is_not_pinned_ends_the_process_on_a_cpu():
    how = {"environment": children.with_cpus(1), "check": False}
    run = lambda kind: children.python("-c", UNPINNED, kind, **how)
    pinned = run("pinned_host")
    assert (pinned.returncode, pinned.stdout) == (0, "24.0\n"), pinned.stderr[-2000:]
    unpinned = run("unpinned_host")
    assert unpinned.returncode < 0, (
        "XLA:CPU takes arrays in `unpinned_host`: states may lie in memory that is not pinned, and"
        " be tested on a CPU"
    )
    assert "memory kind does not match" in unpinned.stderr


def test_a_sharding_of_a_single_device_forgets_its_memory_in_a_trace():
    device = jax.devices()[0]
    mesh = Mesh(np.array([device]), ("data",))
    named = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    single = SingleDeviceSharding(device, memory_kind="pinned_host")

    def traced_on_host(sharding) -> bool:
        shape = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=sharding)
        return on_host(jax.jit(lambda a: a).trace(shape).jaxpr.in_avals[0])

    assert traced_on_host(named)
    assert not traced_on_host(single), (
        "JAX traces a shape with a SingleDeviceSharding in host memory as it lies:"
        " jaxmem/_model/states/layout.py need not give arrays of one device a mesh"
    )

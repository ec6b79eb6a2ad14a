"""Live bytes of a walk: against an independent count, and against compiled programs. A walk tells
what a codec's kernel takes more than its reference, which XLA fuses.
"""

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import jaxmem_kernels
from jaxmem._model.states.store import counted, fetch
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem._trace.liveness.kernels import kernels_of
from jaxmem._trace.liveness.order import ORDERS, as_written
from jaxmem._trace.liveness.walk import runs_references, temporary_bytes
from jaxmem._trace.rewrite import flatten
from tests.shared import models

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults]
KiB = 2**10
X = jnp.ones((16, 16), jnp.float32)  # 1 KiB


def walked(function, *args, donated=(), on_gpu=True) -> int:
    return temporary_bytes(jax.make_jaxpr(function)(*args), donated, on_gpu=on_gpu)


@st.composite
def programs(draw):
    """A function of one matrix that multiplies and adds earlier results in some order."""
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from("@+t"), st.integers(0, 30), st.integers(0, 30)),
            min_size=1,
            max_size=14,
        )
    )

    def function(x):
        known = [x]
        for operation, a, b in steps:
            a, b = known[a % len(known)], known[b % len(known)]
            known.append({"@": a @ b, "+": a + b, "t": jnp.tanh(a)}[operation])
        return known[-1] @ x

    return function


def live_at_most(body, order) -> int:
    """By definition: at each kernel, what was made before it or by it and is read by it or later,
    or returned; less one operand that dies there whose memory the result takes.
    """
    size = lambda v: body.avals[v].size * body.avals[v].dtype.itemsize
    kernels = [body.kernels[i] for i in order]
    returned = {o for o in body.outputs if o is not None}
    most = 0
    for k, kernel in enumerate(kernels):
        made = {v for other in kernels[: k + 1] for v in other.writes}
        later = {v for other in kernels[k + 1 :] for v in other.reads} | returned
        alive = {v for v in made if v in later or v in kernel.reads or v in kernel.writes}
        dying = alive - later - set(kernel.writes)
        free = max((size(v) for v in dying & kernel.overwrites), default=0)
        most = max(most, sum(map(size, alive)) - free)
    return most


@hypothesis.settings(max_examples=60, deadline=None)
@given(programs())
def test_walks_count_what_is_alive_by_its_definition(function):
    jaxpr = jax.make_jaxpr(function)(X)
    body = kernels_of(flatten(jaxpr), 0, True)
    size = lambda v: body.avals[v].size * body.avals[v].dtype.itemsize
    made_by = {v: i for i, k in enumerate(body.kernels) for v in k.writes}
    counts = []
    for order in (*ORDERS, as_written):
        positions = order(body, size)
        assert sorted(positions) == list(range(len(body.kernels)))
        for at, i in enumerate(positions):
            needed = {made_by[v] for v in body.kernels[i].reads if v in made_by}
            assert needed <= set(positions[:at])
        counts.append(live_at_most(body, positions))
    assert temporary_bytes(jaxpr, (), on_gpu=True) in counts


def test_a_donated_argument_gives_its_memory_to_a_result():
    update = lambda p, g: (p - g, (p * g).sum())
    held = walked(update, X, X)
    assert held - walked(update, X, X, donated=[0]) == KiB


def test_loops_one_after_the_other_carry_on_in_a_donated_arguments_memory():
    def twice(x, between):
        body = lambda c, _: (c * 2 + 1, None)
        x = jax.lax.scan(body, x, None, length=10)[0]
        return jax.lax.scan(body, between(x), None, length=10)[0]

    same = lambda x: twice(x, lambda x: jax.lax.optimization_barrier(x))
    assert walked(same, X, donated=[0]) == 0
    assert walked(same, X) == KiB

    # What is read once more after the second loop cannot have given its memory to it.
    def read_later(x):
        kept = []
        y = twice(x, lambda x: kept.append(x) or x)
        return y, kept[0] @ y

    assert walked(read_later, X, donated=[0]) == 2 * KiB


def test_a_loop_carries_on_in_place_and_stacks_what_it_returns():
    def loop(x):
        def body(carry, _):
            carry = carry * 2
            return carry, carry @ carry

        return jax.lax.scan(body, x, None, length=10)

    # the carry, ten results, and one of them before it lies in the stack
    assert walked(loop, X) == (1 + 10 + 1) * KiB
    # a carry that is still read when the next one is made has two places
    swapped = lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=10)[0]
    assert walked(swapped, X) == 2 * KiB


def test_loops_in_a_loop_carry_on_in_place_one_after_the_other():
    """As groups of layers do in each microbatch, with the moments of a stack."""

    def microbatches(x):
        turn = lambda c, _: (c * 2 + 1, None)
        layers = lambda c: jax.lax.scan(turn, c, None, length=5)[0]
        return jax.lax.scan(lambda c, _: (layers(layers(c)), None), x, None, length=3)[0]

    assert walked(microbatches, X, donated=[0]) == 0
    assert walked(microbatches, X) == KiB


def test_a_while_loop_carries_on_in_place_too():
    """Stacks that it updates a layer of are never held twice."""
    stacks = jnp.ones((8, 16, 16), jnp.float32)

    def loop(stacks, turns):
        def body(i, stacks):
            layer = jax.lax.dynamic_index_in_dim(stacks, i, keepdims=False)
            new = jnp.tanh(layer @ layer)
            return jax.lax.dynamic_update_index_in_dim(stacks, new, i, 0)

        return jax.lax.fori_loop(0, turns, body, stacks)

    # the slice that the product reads, the product, and two counters
    assert walked(loop, stacks, jnp.int32(8), donated=[0]) == 2 * KiB + 8
    assert walked(loop, stacks, jnp.int32(8)) == (8 + 2) * KiB + 8


def test_one_result_stacked_under_two_names_is_one_stack():
    def loop(x, twice):
        def body(carry, _):
            y = carry @ carry
            return carry, (y, y.reshape(256) if twice else ())

        return jax.lax.scan(body, x, None, length=10)[1]

    assert walked(lambda x: loop(x, True), X) == walked(lambda x: loop(x, False), X)


def test_values_in_host_memory_take_no_device_bytes():
    offload = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["y"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(x, policy):
        layer = lambda c, _: (jnp.tanh(checkpoint_name(c @ c, "y")), None)
        layer = jax.checkpoint(layer, policy=policy)
        return jax.lax.scan(layer, x, None, length=10)[0].sum()

    keep = jax.checkpoint_policies.save_only_these_names("y")
    gradient = jax.grad(loss)
    kept = walked(lambda x: gradient(x, keep), X)
    assert kept - walked(lambda x: gradient(x, offload), X) == 10 * KiB


def test_devices_share_values():
    product = jax.make_jaxpr(lambda x: jnp.tanh(x @ x) @ x)(X)
    one, four = (temporary_bytes(product, (), on_gpu=True, shards=n) for n in (1, 4))
    assert one == 4 * four > 0


LAYERS, WIDTH = 6, 128


def losses():
    """A loss whose layers are under checkpoints that save nothing, some and all."""

    def layer(x, p, key):
        return x + checkpoint_name(jax.nn.gelu(x @ p["up"]), "h") @ p["down"]

    policies = {
        "nothing": jax.checkpoint_policies.nothing_saveable,
        "one": jax.checkpoint_policies.save_only_these_names("h"),
        "dots": jax.checkpoint_policies.dots_saveable,
        "everything": jax.checkpoint_policies.everything_saveable,
    }
    return {name: models.scanned(policy, layer) for name, policy in policies.items()}


@pytest.mark.todays_checkpoint
def test_walks_tell_what_compiled_steps_take():
    up, down = jnp.ones((LAYERS, WIDTH, 4 * WIDTH)), jnp.ones((LAYERS, 4 * WIDTH, WIDTH))
    weights, x = {"up": up, "down": down}, jnp.ones((512, WIDTH))
    told, compiled = {}, {}
    for name, loss in losses().items():
        step = jax.jit(jax.grad(loss)).trace(weights, x)
        told[name] = temporary_bytes(step.jaxpr, (), on_gpu=False)
        stats = step.lower().compile().memory_analysis()
        compiled[name] = stats.temp_size_in_bytes + stats.output_size_in_bytes
    for name, size in compiled.items():
        assert told[name] == pytest.approx(size, rel=0.2), (name, told, compiled)
    assert told["nothing"] < min(told["one"], told["dots"])
    assert max(told["one"], told["dots"]) < told["everything"]


def test_what_a_loop_fetches_from_host_memory_is_there_from_the_start_of_a_turn():
    far = jnp.ones((4, 16, 16), jnp.float32)

    def loop(x, far, waits):
        far = jax.device_put(far, jax.memory.Space.Host)

        def turn(x, i, _):
            y = jnp.tanh(x @ x)
            y = (y @ x) @ y
            y, j = jax.lax.optimization_barrier((y, i)) if waits else (y, i)
            return y + fetch(far, j), None

        return counted(turn, x, None, 0, 4)[0]

    # Three matrices are held at once in the work; what is fetched early beside them, or after it.
    early = walked(lambda x, far: loop(x, far, False), X, far)
    late = walked(lambda x, far: loop(x, far, True), X, far)
    assert early - late == KiB
    # A CPU has no memory of another kind to fetch from.
    on_cpu = [walked(lambda x, far, w=w: loop(x, far, w), X, far, on_gpu=False) for w in (0, 1)]
    assert on_cpu[0] == on_cpu[1]


ROWS = jax.ShapeDtypeStruct((512, 1024), jnp.float32)


def quantized(x):
    """Encodes a sum. A kernel reads a sum that was written; the reference's is written nowhere."""
    scales = jnp.ones(x.shape[-1], jnp.bfloat16)
    return jaxmem_kernels.quantize_by(x + 1, scales, group=64, stochastic=False)


def masked(x):
    """Packs which values are positive. GPUs run the reference, which writes no mask."""
    return jaxmem_kernels.pack_bits(x > 0, jnp.asarray(False), group=64)


def walked_on_two(jaxpr, divided: bool) -> int:
    return 2 * temporary_bytes(jaxpr, (), on_gpu=True, shards=2, divided=divided)


@pytest.mark.parametrize(("step", "bytes_a_value"), [(quantized, 4), (masked, 0)])
def test_a_walk_tells_what_compiled_kernels_take_more_than_references(step, bytes_a_value):
    step = jax.jit(step)
    with backend_for(Target.parse("h200")) as backend:
        with jaxmem_kernels.references():
            references = backend.compile_fully(None, step.trace(ROWS)).result()
        jax.clear_caches()
        kernels = backend.compile_fully(None, step.trace(ROWS)).result()
    more = kernels.total_bytes - references.total_bytes
    assert more == pytest.approx(bytes_a_value * ROWS.size, rel=0.01)
    jaxpr = step.trace(ROWS).jaxpr
    told = walked_on_two(jaxpr, divided=True) - walked_on_two(jaxpr, divided=False)
    assert told == pytest.approx(more, rel=0.01)


def test_a_gpu_writes_no_mask_that_it_packs():
    with backend_for(Target.parse("h200")) as backend:
        compiled = backend.compile_fully(None, jax.jit(masked).trace(ROWS)).result()
    assert compiled.total_bytes - compiled.argument_bytes == ROWS.size // 8, "the codes alone"


def test_references_run_where_xla_divides_arrays_and_not_inside_shard_map():
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("data")
    mapped = jax.shard_map(quantized, mesh=mesh, in_specs=rows, out_specs=rows)
    looped = lambda x: jax.lax.scan(lambda c, _: (c, quantized(c)), x, length=2)[1]
    assert runs_references(jax.make_jaxpr(quantized)(ROWS))
    assert runs_references(jax.make_jaxpr(looped)(ROWS))
    assert not runs_references(jax.make_jaxpr(mapped)(ROWS))
    assert not runs_references(jax.make_jaxpr(masked)(ROWS)), "also on GPUs at hand"
    assert not runs_references(jax.make_jaxpr(lambda x: x > 0)(ROWS))

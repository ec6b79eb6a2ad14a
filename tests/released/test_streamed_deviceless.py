"""Streamed states for a GPU that is not there: what lies in host memory, and how it is moved."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem._core.assignment import Assignment
from jaxmem._model.states.store import counted, fetch
from jaxmem._target.compile.backend import Deviceless
from jaxmem._target.devices.target import Target
from jaxmem._target.hlo.transfers import fault
from jaxmem._trace.export import export_flat
from jaxmem.errors import StepError
from jaxmem.plans import compiler_options
from tests.shared import meshes, tiny_lm
from tests.shared.marks import slow
from tests.shared.streamed import host_bytes

LAYERS, WIDTH = 6, 256
# Of the bytes that are fetched in loops, those that a product runs beside: older schedulers let the
# backward wait for what it fetches.
BESIDE = 0.9 if jax.__version_info__ >= (0, 11, 1) else 0.5


def compiled(compiler, function, *args, donated=0, options=None):
    traced = jax.jit(function, donate_argnums=donated).trace(*args)
    exported, donated = export_flat(traced, "cuda", 90)
    found = compiler.submit(exported, donated=donated, options=options or {}).result()
    assert found.misplaced == (), "each result stays in the memory of the argument it replaces"
    return found


def moved(found, *, to_host: bool, beside=False) -> int:
    """Bytes that loops move to or from host memory. beside: those that a product runs beside."""
    chosen = [t for t in found.transfers if t.in_loop and t.to_host == to_host]
    return sum(t.nbytes * t.runs for t in chosen if t.products or not beside)


def of_a_model(tx, n, persist, clip=None):
    step = tiny_lm.released(tx, plan=Assignment({"block": {}}), clip=clip)
    params = tiny_lm.parameters(np.float32, layers=LAYERS, width=WIDTH, vocab=512)
    state = step.split(jax.eval_shape(step.init, params), persist)
    return step, state, jax.ShapeDtypeStruct((8 * n, 65), jnp.int32)


def streamed(n, persist, second_moment="squares"):
    tx = jaxmem.adama(1e-3, accumulation_steps=n, second_moment=second_moment)
    return of_a_model(tx, n, persist)


# Of three microbatches two are in a loop, where the layers' own loops begin with what was fetched.
@pytest.mark.quick("3-2-row")
@pytest.mark.parametrize(
    ("n", "persist", "second_moment"),
    [
        (1, 0, "squares"),
        (3, 2, "row"),
        slow(3, 2, "squares"),
        slow(1, 1, "row"),
        slow(4, 5, "squares"),
        slow(1, 1, "squares"),
    ],
)
def test_host_memory_holds_the_placed_states_alone_and_copies_run_beside_products(
    n, persist, second_moment, h200
):
    step, *args = streamed(n, persist, second_moment)
    found = compiled(h200, step, *args)
    # No stack is copied, and each is updated in place: arguments + temporaries + outputs - aliased.
    assert found.host_bytes == host_bytes(args) > 0
    assert fault(found.transfers) is None
    streamed_layers = LAYERS - persist
    layer = host_bytes(args) // streamed_layers
    if streamed_layers > 1:  # a loop of one turn is none in the compiled program
        # Parameters are fetched twice a microbatch, moments once, and stored; parameters are stored
        # once a minibatch. One layer is fetched before the first loop, and the last one in vain.
        fetched = n * streamed_layers * (4 * layer // 3)
        assert moved(found, to_host=False) == fetched
        stored = streamed_layers * (n * 2 * layer // 3 + layer // 3)
        assert moved(found, to_host=True) == stored
        assert moved(found, to_host=False, beside=True) >= BESIDE * fetched
        before = [t.nbytes * t.runs for t in found.transfers if not t.in_loop]
        assert sum(before) == layer // 3


@pytest.mark.quick("1-0")
@pytest.mark.parametrize(("n", "persist"), [(2, 0), (2, 1), (1, 0)])
def test_the_norms_backward_fetches_parameters_once_more_and_no_moments(n, persist, h200):
    tx = jaxmem.adama(1e-3, accumulation_steps=n)
    step, *args = of_a_model(tx, n, persist, clip=("norm", 1.0))
    found = compiled(h200, step, *args)
    assert found.host_bytes == host_bytes(args) > 0
    assert fault(found.transfers) is None
    streamed_layers = LAYERS - persist
    third = host_bytes(args) // streamed_layers // 3  # of a layer: parameters, mu and nu
    # In a microbatch: the forward and the norm's backward fetch parameters, the other all states.
    fetched = n * streamed_layers * (1 + 1 + 3) * third
    assert moved(found, to_host=False) == fetched
    stored = streamed_layers * (n * 2 + 1) * third
    assert moved(found, to_host=True) == stored
    assert moved(found, to_host=False, beside=True) >= BESIDE * fetched
    if persist:  # XLA unrolls the loop of one resident layer, and shares products in it
        return
    plain = compiled(h200, tiny_lm.released(tx, plan=Assignment({"block": {}})), *args)
    product = 2 * (8 * 64) * WIDTH * 2 * WIDTH
    # The norm's backward has four products of gradients for a layer, and recomputes both products
    # of the forward. The other backward needs the second of them for no gradient any more.
    assert found.matmul_flops - plain.matmul_flops == n * LAYERS * (4 + 2 - 1) * product


def test_options_of_what_is_no_step_are_refused():
    with pytest.raises(StepError, match=r"`step` is int; expected the training step"):
        compiler_options(3)


@pytest.mark.parametrize(
    "how", [{"persist": 1, "copies": 3, "buffers": 2}, slow({"persist": 0, "copies": LAYERS})]
)
def test_copies_are_not_fetched_and_buffers_are_fetched_once(how, h200):
    """Of layers with a copy, and of those with a buffer, only the backward fetches: all states of
    the first kind, the moments of the second.
    """
    step, (params, moments), batch = streamed(1, 0)
    step = tiny_lm.released(step.optimizer.tx, plan=step.model.plan, dtype=jnp.bfloat16)
    args = step.split((params, moments), **how), batch
    found = compiled(h200, step, *args)
    assert found.host_bytes == host_bytes(args) > 0
    assert fault(found.transfers) is None
    layer = host_bytes(args) // (LAYERS - how["persist"]) // 3  # its parameters
    copies, buffers = how["copies"], how.get("buffers", 0)
    each_way = layer * 3 * (copies + buffers)
    assert moved(found, to_host=False) == moved(found, to_host=True) == each_way
    if jax.__version_info__ >= (0, 11, 1):  # which a GPU that streams wants
        assert moved(found, to_host=False, beside=True) >= BESIDE * each_way


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, slow(4)])
def test_what_all_microbatches_save_is_held_once(n, h200):
    """Where XLA takes the last microbatch's loop apart, what it saves has memory of its own."""
    rows, sequence = 64, 64
    plan = Assignment({"block": {"in": "keep", "up": "keep"}})

    def temporaries(n):
        step, state, _ = streamed(n, 1)
        step = tiny_lm.released(step.optimizer.tx, plan=plan)
        batch = jax.ShapeDtypeStruct((rows * n, sequence + 1), jnp.int32)
        found = compiled(h200, step, state, batch)
        assert found.host_bytes == host_bytes(state)
        assert fault(found.transfers) is None
        leaves = jax.tree.leaves((state, batch))
        arguments = sum(math.prod(a.shape) * a.dtype.itemsize for a in leaves)
        return found.total_bytes - (arguments - host_bytes(state))

    saved = LAYERS * rows * sequence * (WIDTH + 2 * WIDTH) * 4
    alone = temporaries(1)
    assert alone > saved
    assert temporaries(n) < alone + saved / 10


def test_a_stack_of_one_layer_is_copied_as_a_whole(h200):
    step, *args = streamed(1, LAYERS - 1)
    found = compiled(h200, step, *args)
    assert {t.how for t in found.transfers} == {"dma"}
    assert found.host_bytes == host_bytes(args)


def test_a_stacks_gradient_is_stacked_in_host_memory_a_layer_at_a_time(h200):
    layers = streamed(1, 0)[1][0]["blocks"]
    x = jax.ShapeDtypeStruct((8, 64, 256), jnp.float32)
    shared = jax.ShapeDtypeStruct((256,), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)

    def loss(layers, x, *shared):
        plan = Assignment({"block": {}})
        return jaxmem.stack(tiny_lm.block, layers, x, *shared, plan=plan).sum()

    found = compiled(h200, jax.value_and_grad(loss), layers, x, *shared, donated=())
    assert fault(found.transfers) is None
    assert found.host_bytes == 2 * host_bytes(layers)
    assert moved(found, to_host=True) == host_bytes(layers)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)


@pytest.mark.quick("tx0-0")
@pytest.mark.parametrize(
    ("tx", "persist"),
    [
        (optax.lion(SCHEDULE, weight_decay=0.1), 0),
        (optax.sgd(1e-3, momentum=0.9, nesterov=True), 2),
        slow(optax.adamw(SCHEDULE), 1),
        slow(optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.rmsprop)(1e-3)), 0),
    ],
)
def test_an_update_in_the_backward_moves_each_state_once_each_way(tx, persist, h200):
    step, *args = of_a_model(tx, 1, persist)
    found = compiled(h200, step, *args)
    (params, optimizer), layers = args[0], LAYERS - persist
    host = {"params": host_bytes(params), "optimizer": host_bytes(optimizer)}
    assert host["params"] == layers * 2 * 2 * WIDTH * WIDTH * 4
    assert host["optimizer"] in (host["params"], 2 * host["params"])
    assert found.host_bytes == sum(host.values())
    assert fault(found.transfers) is None
    fetched = 2 * host["params"] + host["optimizer"]
    assert moved(found, to_host=False) == fetched
    assert moved(found, to_host=True) == host["params"] + host["optimizer"]
    assert moved(found, to_host=False, beside=True) >= BESIDE * fetched


def test_no_gradient_of_a_layer_outlives_it(h200):
    """Of a resident state, beside a step that has the gradient of all layers at once."""
    tx = optax.lion(SCHEDULE)
    step, (params, optimizer), batch = of_a_model(tx, 1, LAYERS)

    def whole(state, batch):
        def loss(params):
            x, *shared = tiny_lm.embed(params, batch)
            y = jaxmem.stack(tiny_lm.block, params["blocks"], x, *shared)
            return tiny_lm.head(params, y, batch)

        updates, optimizer = tx.update(jax.grad(loss)(state[0]), state[1], state[0])
        return optax.apply_updates(state[0], updates), optimizer

    state = params, optimizer
    released, held = (compiled(h200, f, state, batch) for f in (step, whole))
    layers = sum(math.prod(a.shape) * 4 for a in jax.tree.leaves(params["blocks"]))
    # All layers' gradients but one, which are alive at once there and not here.
    assert released.temp_bytes < held.temp_bytes - layers * (LAYERS - 2) // LAYERS


THERE = NamedSharding(meshes.abstract(1), PartitionSpec(), memory_kind="pinned_host")
STACK = jax.ShapeDtypeStruct((8, 256, 256), jnp.float32, sharding=THERE)
X = jax.ShapeDtypeStruct((64, 256), jnp.float32)


def by_a_counter(stack, x):
    body = lambda x, i, _: (jnp.tanh(x @ fetch(stack, i)), None)
    return stack, counted(body, x, None, 0, 8)[0]


def by_arange(stack, x):
    body = lambda x, i: (jnp.tanh(x @ fetch(stack, i)), None)
    return stack, jax.lax.scan(body, x, jnp.arange(8))[0]


def refused(step, match, monkeypatch):
    """Asserts that no step is compiled whose states are moved wrongly."""
    # Older releases refuse every step with arguments in host memory, before it is compiled.
    monkeypatch.setattr("jaxmem._target.devices.support.installed", lambda _: "0.11.1")
    stage = jax.jit(step, donate_argnums=0).trace(STACK, X)
    with Deviceless(Target.parse("h200"), workers=1) as backend:
        for _ in range(2):  # the second is found in the database
            with pytest.raises(StepError, match=match):
                backend.compile_fully(stage, stage).result()


def test_an_index_that_is_read_as_data_makes_kernels_of_copies_and_is_refused(h200, monkeypatch):
    assert fault(compiled(h200, by_a_counter, STACK, X).transfers) is None
    assert "reads host memory by 1 kernels" in fault(compiled(h200, by_arange, STACK, X).transfers)
    refused(by_arange, "not moved by copies alone: XLA reads .* kernels", monkeypatch)


def metric_first(stack, x):
    """A result on the device that looks like the stack, before the stack."""
    stack, y = by_a_counter(stack, x)
    return jnp.ones_like(x, shape=stack.shape) * y.sum(), stack


def test_a_result_that_takes_the_buffer_of_an_argument_elsewhere_is_refused(monkeypatch):
    refused(metric_first, r"f32\[8,256,256\] is in host memory on one side", monkeypatch)

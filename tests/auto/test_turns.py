"""Layers that are nearly alike, in turns of a Python loop or of a scan's iteration: each layer is a
block.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._core.actions import KEEP, UNTAGGED
from jaxmem._core.groups import span_of, ungrouped
from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem._trace.jaxpr import matmul_flops
from jaxmem.plans import Assignment
from tests.auto.steps import NOTHING, layers_of, update
from tests.shared.compare import relative
from tests.shared.deviceless import result
from tests.shared.foreign.unlike import loss_of_couplings
from tests.shared.programs import nbytes

WIDTH, SIDE, LENGTH, LAYERS = 16, 8, 64, 6
S = jax.ShapeDtypeStruct
NAMES = ("qkv", "out", "up", "down")


def normed(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def attention(x, layer, mask=None):
    q, k, v = jnp.split(x @ layer["qkv"], 3, -1)
    scores = q @ k.swapaxes(-1, -2)
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    return jax.nn.softmax(scores) @ v @ layer["out"]


def with_mlp(x, layer):
    return x + jax.nn.gelu(normed(x) @ layer["up"]) @ layer["down"]


def windowed(x, layer, turn):
    """Attention in windows of an image, which are shifted in every second layer."""
    rows, half = SIDE // 2, SIDE // 4
    h = normed(x)
    if turn % 2:
        h = jnp.roll(h, (-half, -half), (1, 2))
    h = h.reshape(-1, 2, rows, 2, rows, WIDTH).transpose(0, 1, 3, 2, 4, 5)
    h = attention(h.reshape(-1, 4, rows * rows, WIDTH), layer)
    h = h.reshape(-1, 2, 2, rows, rows, WIDTH).transpose(0, 1, 3, 2, 4, 5)
    h = h.reshape(x.shape)
    return with_mlp(x + (jnp.roll(h, (half, half), (1, 2)) if turn % 2 else h), layer)


def local_or_global(x, layer, turn):
    """Attention within chunks, and in every third layer over all positions."""
    h = normed(x)
    if turn % 3 < 2:
        h = attention(h.reshape(-1, 8, LENGTH // 8, WIDTH), layer).reshape(x.shape)
    else:
        h = attention(h, layer, jnp.tril(jnp.ones((LENGTH, LENGTH), bool)))
    return with_mlp(x + h, layer)


def state_space(x, layer):
    """A linear recurrence of eight states for each channel, with a gate and without an MLP."""
    h = normed(x)
    decay, values, mixed = jnp.split(h @ layer["qkv"], 3, -1)
    gate = mixed + jax.nn.silu(h @ layer["up"]) @ layer["down"]
    rates = jax.nn.sigmoid(decay[..., None] * jnp.arange(1, 9) / 8)
    combine = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
    _, states = jax.lax.associative_scan(combine, (rates, rates * values[..., None]), axis=1)
    return x + (states.sum(-1) * gate) @ layer["out"]


def state_space_or_attention(x, layer, turn):
    return state_space(x, layer) if turn % 3 < 2 else local_or_global(x, layer, 2)


def chosen(x, layer, turn):
    """A layer that a conditional chooses."""
    return jax.lax.cond(
        x.mean() > 0,
        functools.partial(local_or_global, turn=0),
        functools.partial(local_or_global, turn=2),
        x,
        layer,
    )


def loss_of(layer, checkpoint, cast=False):
    def loss(params, x):
        if cast:
            params, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x))
        for turn, weights in enumerate(params):
            x = checkpoint(functools.partial(layer, turn=turn))(x, weights)
        return (x.astype(jnp.float32) ** 2).mean()

    return loss


def scanned(layer, checkpoint, count, more=False):
    """The loss of a scan whose iteration has `count` layers.

    more: whether the layers have dropout, and the scan returns a number of each.
    """

    def turn(carry, weights):
        x, key = carry
        key, *keys = jax.random.split(key, count + 1) if more else [key] * (count + 1)
        numbers = []
        for number, own in enumerate(keys):
            of_layer = jax.tree.map(lambda a, i=number: a[i], weights)
            x = checkpoint(functools.partial(layer, turn=number))(x, of_layer)
            if more:
                x = x * jax.random.bernoulli(own, 0.9, x.shape[:1] + (1,) * (x.ndim - 1))
                numbers.append((x**2).mean())
        return (x, key), numbers

    def loss(params, x):
        (x, _), numbers = jax.lax.scan(turn, (x, jax.random.key(3)), params)
        return (x**2).mean() + 0.1 * sum(map(jnp.sum, numbers))

    return loss


def stacked(turns, count):
    """Parameters of `turns` iterations of `count` layers each."""
    by_turn = lambda *leaves: jnp.stack(leaves).reshape(turns, count, *leaves[0].shape)
    return jax.tree.map(by_turn, *parameters(turns * count))


def training(loss):
    return lambda params, x: update(params, jax.grad(loss)(params, x))


def takes_no_more_bytes(h200, made, *args):
    """Asserts that recomputing all takes no more bytes than checkpoints by hand, and returns the
    loss with blocks and the plain loss.

    made: returns the loss for a checkpoint of each layer.
    """
    plain = made(lambda f: f)
    ours = jaxmem.auto(plain, NOTHING)
    bytes_of = lambda loss: result(h200, training(loss), *args).temp_bytes
    assert bytes_of(ours) <= bytes_of(made(jax.checkpoint))
    return ours, plain


def counts_of(loss, *args) -> list[int]:
    """The number of layers of each label, in the order of the labels' first layers."""
    return [*collections.Counter(layer.label for layer in layers_of(loss, *args)).values()]


def parameters(layers=LAYERS):
    sizes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 64),
        "down": (64, WIDTH),
    }
    keys = jax.random.split(jax.random.key(0), (layers, len(NAMES)))
    normal = lambda key, name: 0.2 * jax.random.normal(key, sizes[name], jnp.float32)
    return [{name: normal(key, name) for key, name in zip(each, NAMES)} for each in keys]


IMAGE = jax.random.normal(jax.random.key(1), (8, SIDE, SIDE, WIDTH), jnp.float32)
TEXT = jax.random.normal(jax.random.key(1), (8, LENGTH, WIDTH), jnp.float32)
TURNS = {
    "windows": (windowed, IMAGE, [3, 3]),
    "local and global": (local_or_global, TEXT, [4, 2]),
    "state space and attention": (state_space_or_attention, TEXT, [4, 2]),
}


@pytest.mark.jax_defaults
@pytest.mark.parametrize("cast", [False, True], ids=["", "cast first"])
@pytest.mark.parametrize("name", TURNS)
def test_each_layer_is_a_block(name, cast):
    layer, x, counts = TURNS[name]
    assert counts_of(loss_of(layer, lambda f: f, cast), parameters(), x) == counts


@pytest.mark.jax_defaults
@pytest.mark.quick("local and global")
@pytest.mark.parametrize("name", TURNS)
def test_recomputing_all_takes_no_more_bytes_than_checkpoints_by_hand(name, h200):
    """Compiled for an H200: XLA:CPU of jaxlib 0.10 undoes checkpoints in a Python loop."""
    layer, x, _ = TURNS[name]
    ours, plain = takes_no_more_bytes(h200, functools.partial(loss_of, layer), parameters(), x)
    got, want = (jax.jit(jax.grad(loss))(parameters(), x) for loss in (ours, plain))
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(want))
    assert relative(got, want) < 1e-5


ITERATIONS = 4
SCANS = {
    "windows": (windowed, IMAGE, [1, 1]),
    "local and global": (local_or_global, TEXT, [2, 1]),
    "state space and attention": (state_space_or_attention, TEXT, [2, 1]),
    "chosen by a conditional": (chosen, TEXT, [2]),
}


@pytest.mark.jax_defaults
@pytest.mark.parametrize("more", [False, True], ids=["", "with more"])
@pytest.mark.parametrize("name", SCANS)
def test_each_layer_of_an_iteration_is_a_block(name, more):
    layer, x, counts = SCANS[name]
    loss = scanned(layer, lambda f: f, sum(counts), more)
    found = layers_of(loss, stacked(ITERATIONS, sum(counts)), x)
    # The keys of all layers, and the number of the last one, make the layers unequal.
    want = [1] * sum(counts) if more else counts
    assert [*collections.Counter(layer.label for layer in found).values()] == want
    assert {layer.turns for layer in found} == {ITERATIONS}


@pytest.mark.jax_defaults
def test_an_iteration_is_one_block_where_the_inputs_of_all_layers_are_more_bytes():
    loss = scanned(local_or_global, lambda f: f, 2)
    assert len(layers_of(loss, stacked(2, 2), TEXT)) == 2
    assert len(layers_of(loss, stacked(200, 2), TEXT)) == 1


@pytest.mark.jax_defaults
@pytest.mark.parametrize("name", [name for name in SCANS if name != "windows"])
def test_recomputing_all_layers_of_iterations_takes_no_more_bytes_than_checkpoints_by_hand(
    name, h200
):
    layer, x, counts = SCANS[name]
    made = lambda checkpoint: scanned(layer, checkpoint, sum(counts))
    args = stacked(ITERATIONS, sum(counts)), x
    ours, plain = takes_no_more_bytes(h200, made, *args)
    got, want = (jax.jit(jax.grad(loss))(*args) for loss in (ours, plain))
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(want))
    assert relative(got, want) < 1e-5


@pytest.mark.jax_defaults
def test_a_layer_of_attention_and_an_mlp_is_one_block_of_an_iteration():
    layer = functools.partial(local_or_global, turn=2)

    def decoder(x, weights, turn):
        x = x + attention(normed(x), weights, jnp.tril(jnp.ones((LENGTH, LENGTH), bool)))
        return layer(x, weights)

    one = lambda of: layers_of(scanned(of, lambda f: f, 1), stacked(ITERATIONS, 1), TEXT)
    assert len(one(lambda x, weights, turn: layer(x, weights))) == 1
    assert len(one(decoder)) > 1


KEPT = {UNTAGGED: KEEP}
GROUPS = {"auto[0:1]": {}, "auto[1:4]": KEPT, "auto_2[0:3]": KEPT, "auto_2[3:4]": {}}


SPANS = {f"{label}[{numbers}]": {} for label in ("auto", "auto_2") for numbers in ("0:1", "1:4:2")}


@pytest.mark.jax_defaults
@pytest.mark.parametrize("actions", [None, GROUPS, SPANS], ids=["recomputed", "groups", "spans"])
def test_layers_of_iterations_have_the_gradients_of_the_loss(actions):
    loss = scanned(local_or_global, lambda f: f, 3, more=actions is None)
    ours = jaxmem.auto(loss, Assignment(actions) if actions else NOTHING)
    args = stacked(ITERATIONS, 3), TEXT
    got, want = (jax.jit(jax.grad(of))(*args) for of in (ours, loss))
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(want))
    assert relative(got, want) < 1e-5


def products(actions) -> int:
    """The number of matrix products in a step of `ITERATIONS` iterations of three layers."""
    step = training(jaxmem.auto(scanned(local_or_global, lambda f: f, 3), Assignment(actions)))
    with todays_checkpoint():
        traced = jax.make_jaxpr(step)(stacked(ITERATIONS, 3), TEXT)
    return sum(matmul_flops(eqn)[1] for eqn in traced.eqns)


@pytest.mark.jax_defaults
def test_a_group_of_iterations_recomputes_the_layers_of_its_label_alone():
    kept = products({"auto": KEPT, "auto_2": KEPT})
    # The last of a layer's six products is not repeated.
    assert products({"auto": {}, "auto_2": KEPT}) - kept == 5 * 2 * ITERATIONS
    assert products(GROUPS) - kept == 5 * (2 * 1 + 1)


@pytest.mark.jax_defaults
@pytest.mark.parametrize(("span", "again"), [(2, 4), (3, 3)])
def test_the_layers_of_a_span_of_iterations_run_forward_once_more(span, again):
    """In spans of three of four iterations, the last iteration is in no span."""
    in_spans = {f"{label}[0:{ITERATIONS}:{span}]": {} for label in ("auto", "auto_2")}
    assert products(in_spans) - products({"auto": {}, "auto_2": {}}) == 6 * 3 * again


@pytest.mark.jax_defaults
@pytest.mark.parametrize("other", ["auto_2", "auto_2[0:4:3]", "auto_2[0:2]"])
def test_blocks_that_take_turns_are_in_the_same_spans(other):
    actions = {"auto[0:4:2]": {}, other: {}}
    if other == "auto_2[0:2]":
        actions["auto_2[2:4]"] = {}
    with pytest.raises(jaxmem.errors.TagError, match=r"auto\[0:4:2\], auto_2.* take turns"):
        products(actions)


@pytest.mark.jax_defaults
def test_iterations_in_spans_meet_a_budget_below_the_least_of_saved_layers():
    step = training(scanned(local_or_global, lambda f: f, 3))
    args, auto = (stacked(36, 3), TEXT), jaxmem.auto(step)
    least = jaxmem.plans.price(auto, NOTHING, *args).compiled_bytes
    plan = jaxmem.plan(auto, *args, budget=int(0.85 * least), actions=jaxmem.plans.LOSSLESS)
    assert plan.compiled_bytes <= 0.85 * least
    assert plan.predicted_bytes == pytest.approx(plan.compiled_bytes, rel=0.15)
    first, second = plan.actions
    assert (ungrouped(first), ungrouped(second)) == ("auto_2", "auto")
    assert span_of(first) == span_of(second) > 1
    want = jax.jit(step)(*args)
    assert relative(plan.step(*args), want) < 1e-5


@pytest.mark.jax_defaults
def test_a_plan_decides_layers_of_iterations_within_the_bytes_of_checkpoints_by_hand():
    args = stacked(ITERATIONS, 3), TEXT
    plain, by_hand = (
        training(scanned(local_or_global, f, 3)) for f in (lambda f: f, jax.checkpoint)
    )
    memory = jax.jit(by_hand, donate_argnums=0).lower(*args).compile().memory_analysis()
    # The outputs alias the donated parameters.
    budget = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    plan = jaxmem.plan(jaxmem.auto(plain), *args, budget=budget, actions=jaxmem.plans.LOSSLESS)
    assert plan.compiled_bytes <= budget
    assert {ungrouped(label) for label in plan.actions} == {"auto", "auto_2"}
    assert plan.predicted_bytes == pytest.approx(plan.compiled_bytes, rel=0.1)
    want = jax.jit(plain)(*args)
    assert relative(plan.step(*args), want) < 1e-5


@pytest.mark.jax_defaults
def test_two_layers_are_one_block_where_the_inputs_of_all_layers_are_more_bytes():
    def layer(x, weights, turn):
        return with_mlp(jnp.roll(x, 1, 1) if turn % 2 else x, weights)

    loss = loss_of(layer, lambda f: f)
    assert counts_of(loss, parameters(4), TEXT) == [2, 2]
    assert counts_of(loss, parameters(100), TEXT) == [50]


@pytest.mark.jax_defaults
def test_the_first_layer_is_a_block_though_it_adds_to_a_number(h200):
    shapes = {"in": S((8, 128), jnp.float32), "out": S((128, 16), jnp.float32)}
    args = [shapes] * LAYERS, S((512, 16), jnp.float32)
    plain = loss_of_couplings(lambda f: f)
    assert counts_of(plain, *args) == [1, LAYERS - 1]
    by_hand = training(loss_of_couplings(jax.checkpoint))
    found = result(h200, jaxmem.auto(training(plain), NOTHING), *args).temp_bytes
    assert found <= result(h200, by_hand, *args).temp_bytes


@pytest.mark.jax_defaults
def test_the_end_of_an_iteration_with_a_loop_inside_is_recomputed_too():
    """The loop has most FLOPs of an iteration, and a layer follows it."""

    def loss_of_pattern(of_layers, of_end):
        def turn(x, weights):
            layers, last = weights
            of_layer = of_layers(functools.partial(local_or_global, turn=0))
            x, _ = jax.lax.scan(lambda x, own: (of_layer(x, own), None), x, layers)
            x = of_layers(lambda x, own: x + attention(normed(x), own))(x, last)
            return of_end(with_mlp)(x, last), None

        return lambda params, x: (jax.lax.scan(turn, x, params)[0] ** 2).mean()

    args = (stacked(ITERATIONS, 3), jax.tree.map(lambda a: a[:, 0], stacked(ITERATIONS, 1))), TEXT
    keep = lambda f: f
    plain, but_for_end = (loss_of_pattern(of, keep) for of in (keep, jax.checkpoint))
    by_hand = loss_of_pattern(jax.checkpoint, jax.checkpoint)
    bytes_of = lambda loss: nbytes(jax.jit(training(loss)).lower(*args).compile())
    ours, end = jaxmem.auto(plain, NOTHING), bytes_of(but_for_end) - bytes_of(by_hand)
    assert end > 0
    assert bytes_of(ours) < bytes_of(but_for_end) - 0.9 * end

"""Programs that are derived from the step with every tag recomputed, against traced programs."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem._core.actions import RECOMPUTE, UNTAGGED, Action, Choice
from jaxmem._core.assignment import Assignment
from jaxmem._model.auto.step import build_of
from jaxmem._model.tags.derive import RecomputedStep
from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem._model.tags.named import is_block, names_in
from jaxmem._trace.jaxpr import _scan_layout, as_function, equations, needed
from jaxmem._trace.liveness.walk import temporary_bytes
from jaxmem._trace.step import trace

WIDTH, ROWS = 32, 64


def normal(*shape) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape, jnp.float32) / WIDTH**0.5


def descended(loss):
    """A step of gradient descent."""

    def step(params, *batch):
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def skips():
    """Unlike layers; the later layers read the inputs of the earlier layers."""

    def loss(params, x):
        down, up = params
        inputs = []
        for weights in down:
            inputs.append(x)
            x = x + jax.nn.silu(x @ weights)
        for weights in up:
            x = jnp.concatenate([x, inputs.pop()], -1)
            x = jnp.tanh(x @ weights)
        return jnp.mean(x**2)

    sizes = [normal(WIDTH, WIDTH) for _ in range(3)], [normal(2 * WIDTH, WIDTH) for _ in range(3)]
    return build_of(descended(loss)), (sizes, normal(ROWS, WIDTH))


def dropout_in_microbatches():
    """Layers with a softmax and a mask of dropout, in a loop over microbatches."""

    def loss(params, x, key):
        for i, (wide, narrow) in enumerate(params):
            mask = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, (x.shape[0], WIDTH))
            x = x + jnp.where(mask, jax.nn.softmax(x @ wide, -1) @ narrow, 0.0)
        return jnp.mean(x**2)

    def step(params, x, keys):
        def add(total, batch):
            value, gradients = jax.value_and_grad(loss)(params, *batch)
            return jax.tree.map(jnp.add, total, gradients), value

        total, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (x, keys))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, total), values

    params = [(normal(WIDTH, 2 * WIDTH), normal(2 * WIDTH, WIDTH)) for _ in range(3)]
    return build_of(step), (params, normal(2, ROWS, WIDTH), jax.random.split(jax.random.key(0), 2))


def tagged_by_hand():
    """Blocks by hand in a step that calls a jitted step, with names of JAX and of jaxmem."""

    def build(plan):
        def block(x, weights):
            first, second = weights
            x = checkpoint_name(x, "input")
            return x + jaxmem.tag(jnp.sin(x @ first), "wave") @ second

        layer = jax.checkpoint(block, policy=jaxmem.remat_policy(plan))

        def loss(params, x):
            for weights in params:
                x = layer(x, weights)
            return jnp.mean(x**2)

        inner = jax.jit(descended(loss))
        return lambda params, x: inner(params, x)

    params = [(normal(WIDTH, 2 * WIDTH), normal(2 * WIDTH, WIDTH)) for _ in range(4)]
    return build, (params, normal(ROWS, WIDTH))


def dropout_at_the_end():
    """Layers that end with dropout: a layer's mask is near the tags of the next layer, and far from
    the other tags of its own.
    """

    def loss(params, x, key):
        for i, (wide, narrow) in enumerate(params):
            x = x + jnp.tanh(x @ wide) @ narrow
            mask = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
            x = jnp.where(mask, x / jnp.float32(0.9), 0.0)
        return jnp.mean(x**2)

    params = [(normal(WIDTH, 2 * WIDTH), normal(2 * WIDTH, WIDTH)) for _ in range(4)]
    return build_of(descended(loss)), (params, normal(ROWS, WIDTH), jax.random.key(0))


def mlp(x, weights):
    """A layer that a scan can run. The last tag of a block with this layer has no derivative."""
    wide, narrow = weights
    x = x + jnp.tanh(x @ wide) @ narrow
    return checkpoint_name(x, "output"), jnp.sum(x)


def stacked(layers: int = 4):
    return normal(layers, WIDTH, 2 * WIDTH), normal(layers, 2 * WIDTH, WIDTH)


def scan_in_microbatches():
    """A scan over layers with a mask of dropout, in a loop over microbatches."""

    def loss(params, x, key):
        def layer(carry, weights):
            x, key = carry
            key, own = jax.random.split(key)
            x, _ = mlp(x, weights)
            return (jnp.where(jax.random.bernoulli(own, 0.9, x.shape), x, 0.0), key), None

        (x, _), _ = jax.lax.scan(layer, (x, key), params)
        return jnp.mean(x**2)

    def step(params, x, keys):
        def add(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *batch)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (x, keys))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, total)

    keys = jax.random.split(jax.random.key(0), 2)
    return build_of(step), (stacked(), normal(2, ROWS, WIDTH), keys)


def two_scans():
    """Two scans over layers of one shape, each with a result for every layer."""

    def loss(params, x):
        x, first = jax.lax.scan(mlp, x, params)
        x, second = jax.lax.scan(mlp, jnp.sin(x), params)
        return jnp.mean(x**2) + jnp.mean(first * second)

    return build_of(descended(loss)), (stacked(), normal(ROWS, WIDTH))


def scan_of_scans():
    """A scan of scans: of two equal blocks of one label, and of one other block, in turns."""

    def build(plan):
        def wave(x, weights):
            return x + jaxmem.tag(jnp.sin(jaxmem.tag(x, "input") @ weights[0]), "wave") @ weights[1]

        policy = jaxmem.remat_policy(plan, block="waves")
        waves = jax.checkpoint(wave, policy=policy)
        other = jax.checkpoint(mlp, policy=jaxmem.remat_policy(plan, block="mlp"))

        def layers(x, weights):
            x, _ = jax.lax.scan(lambda x, w: (waves(waves(x, w), w), None), x, weights)
            return other(x, jax.tree.map(lambda w: w[0], weights))

        def loss(params, x):
            x, sums = jax.lax.scan(layers, x, params)
            return jnp.mean(x**2) + jnp.mean(sums)

        return descended(loss)

    params = normal(3, 2, WIDTH, 2 * WIDTH), normal(3, 2, 2 * WIDTH, WIDTH)
    return build, (params, normal(ROWS, WIDTH))


def stack_by_hand():
    """`jaxmem.stack`, whose backward reads the parameters by index."""

    def build(plan):
        def block(weights, x):
            wide, narrow = weights
            return x + jaxmem.tag(jnp.tanh(x @ wide), "up") @ narrow

        def loss(params, x):
            return jnp.mean(jaxmem.stack(block, params, x, plan=plan) ** 2)

        return descended(loss)

    return build, (stacked(), normal(ROWS, WIDTH))


def released(loss, params):
    step = jaxmem.released_step(optax.sgd(0.1, momentum=0.9), loss)
    rows = normal(8 * ROWS, WIDTH)
    return step.with_plan, (step.init(params, rows), rows)


def released_scan():
    """A released step whose layers a scan runs."""
    return released(lambda p, x: jnp.mean(jax.lax.scan(mlp, x, p)[0] ** 2), stacked())


def released_python_loop():
    """A released step of a Python loop over layers: a backward makes a layer's parameters again."""

    def loss(params, x):
        for weights in params:
            x, _ = mlp(
                x, jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), weights)
            )
        return jnp.mean(x**2)

    return released(loss, [(normal(WIDTH, 2 * WIDTH), normal(2 * WIDTH, WIDTH)) for _ in range(4)])


MODELS = (
    skips,
    dropout_at_the_end,
    dropout_in_microbatches,
    tagged_by_hand,
    scan_in_microbatches,
    two_scans,
    scan_of_scans,
    stack_by_hand,
    released_scan,
    released_python_loop,
)
CODEC = Choice(Action.COMPRESS, "grouped_symmetric")


def traced_under(build, plan, args):
    with todays_checkpoint():  # as a search traces the steps that it reads
        return trace(build, plan, args)[1]


def tags_of(traced) -> dict[str, list[str]]:
    """The names of the tags of each block."""
    found: dict[str, set[str]] = {}
    for eqn in filter(is_block, equations(traced.jaxpr.jaxpr)):
        found.setdefault(eqn.params["policy"].block, set()).update(names_in(eqn))
    return {label: sorted(names) for label, names in found.items()}


def operations(program) -> list[str]:
    """The operations that lead to a result, sorted."""
    return sorted(eqn.primitive.name for eqn in equations(needed(program.jaxpr)[0]))


def without_rounding(names: list[str]) -> list[str]:
    """JAX rounds a kept value to its own precision if the forward of its block reads the value. A
    derived program rounds none.
    """
    return [name for name in names if name != "reduce_precision"]


def drawn(tags: dict[str, list[str]], seed: int) -> Assignment:
    """A random assignment. Masks and names of JAX are not compressed."""
    rng = random.Random(seed)
    plain = [RECOMPUTE, Choice(Action.KEEP), Choice(Action.OFFLOAD)]

    def choice(name: str) -> Choice:
        return rng.choice(plain if "mask" in name or name == "input" else [*plain, CODEC])

    return Assignment({label: {n: choice(n) for n in names} for label, names in tags.items()})


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_derived_programs_take_the_bytes_of_traced_programs(model):
    build, args = model()
    nothing = traced_under(build, Assignment.nothing(), args)
    step, tags = RecomputedStep(nothing.jaxpr), tags_of(nothing)
    seen = set()
    for seed in range(6):
        plan = drawn(tags, seed)
        derived, traced = step.under(plan), traced_under(build, plan, args)
        assert derived is not None
        names = without_rounding(operations(traced.jaxpr))
        assert without_rounding(operations(derived)) == names
        read = traced.jaxpr
        if model is released_scan:  # its traced scan carries a counter that nothing reads
            read = read.replace(jaxpr=needed(read.jaxpr)[0])
        for on_gpu in (False, True):
            expected = temporary_bytes(read, (), on_gpu=on_gpu)
            assert temporary_bytes(derived, (), on_gpu=on_gpu) == expected
            seen.add(expected)
    assert len(seen) > 2  # the assignments differ in bytes


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_derived_programs_compute_the_step(model):
    build, args = model()
    nothing = traced_under(build, Assignment.nothing(), args)
    step, tags, leaves = RecomputedStep(nothing.jaxpr), tags_of(nothing), jax.tree.leaves(args)
    for seed in range(3):
        plan = drawn(tags, seed)
        derived = step.under(plan)
        assert derived is not None
        expected = as_function(traced_under(build, plan, args).jaxpr)(*leaves)
        for got, want in zip(as_function(derived)(*leaves), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_tags_that_two_blocks_put_on_one_value_belong_to_their_own_blocks():
    build, args = skips()
    nothing = traced_under(build, Assignment.nothing(), args)
    step, tags = RecomputedStep(nothing.jaxpr), tags_of(nothing)
    for label, names in tags.items():
        plan = Assignment({b: {n: CODEC for n in names if b == label} for b in tags})
        derived, traced = step.under(plan), traced_under(build, plan, args)
        assert operations(derived) == operations(traced.jaxpr), label


def test_a_tag_that_jax_moves_out_of_a_scan_is_traced():
    def build(plan):
        def block(x, weights, mask):
            return x + jaxmem.tag(jnp.exp(mask), "mask") * jnp.tanh(x @ weights)

        layer = jax.checkpoint(block, policy=jaxmem.remat_policy(plan))

        def loss(params, x, mask):
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w, mask), None), x, params)
            return jnp.mean(x**2)

        return descended(loss)

    args = normal(4, WIDTH, WIDTH), normal(ROWS, WIDTH), normal(ROWS, WIDTH)
    step = RecomputedStep(traced_under(build, Assignment.nothing(), args).jaxpr)
    assert step.under(Assignment({"block": {"mask": Choice(Action.KEEP)}})) is None


def test_tags_that_may_belong_to_a_layer_in_two_ways_are_traced():
    """The last tag is in the forward alone, and has the name of the tag before it."""

    def build(plan):
        def block(x, weights):
            x = jaxmem.tag(jnp.sin(x @ weights), "wave")
            return jaxmem.tag(jnp.sin(jaxmem.tag(x @ weights, "product")), "product")

        layer = jax.checkpoint(block, policy=jaxmem.remat_policy(plan))

        def loss(params, x):
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)
            return jnp.sum(x**2)

        return descended(loss)

    args = normal(4, WIDTH, WIDTH), normal(ROWS, WIDTH)
    step = RecomputedStep(traced_under(build, Assignment.nothing(), args).jaxpr)
    assert step.under(Assignment({"block": {"product": Choice(Action.KEEP)}})) is None


@pytest.mark.parametrize(
    "within",
    [jax.disable_jit(), jax.transfer_guard("disallow_explicit")],
    ids=["without jit", "without transfers"],
)
def test_programs_are_derived_under_settings_of_jax(within):
    _scan_layout.cache_clear()
    build, args = two_scans()
    nothing = traced_under(build, Assignment.nothing(), args)
    step, plan = RecomputedStep(nothing.jaxpr), drawn(tags_of(nothing), 0)
    with within:
        derived = step.under(plan)
    assert derived is not None
    assert str(derived) == str(step.under(plan))


def test_groups_of_layers_and_values_without_tags_are_traced():
    build, args = tagged_by_hand()
    step = RecomputedStep(traced_under(build, Assignment.nothing(), args).jaxpr)
    kept = {"wave": Choice(Action.KEEP)}
    assert step.under(Assignment({"block": kept})) is not None
    assert step.under(Assignment({"block[0:2]": kept, "block[2:4]": {}})) is None
    assert step.under(Assignment({"block": kept | {UNTAGGED: Choice(Action.KEEP)}})) is None


def test_policies_that_are_combined_with_others_are_traced():
    others = jax.checkpoint_policies.save_only_these_names("input")

    def combined(plan):
        def block(x, w):
            return jnp.tanh(checkpoint_name(x, "input") @ w)

        policy = jax.checkpoint_policies.save_from_both_policies(jaxmem.remat_policy(plan), others)
        layer = jax.checkpoint(block, policy=policy)
        return descended(lambda params, x: jnp.mean(layer(layer(x, params), params)))

    args = normal(WIDTH, WIDTH), normal(ROWS, WIDTH)
    step = RecomputedStep(traced_under(combined, Assignment.nothing(), args).jaxpr)
    assert step.under(Assignment({"block": {"input": Choice(Action.KEEP)}})) is None

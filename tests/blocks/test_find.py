"""Blocks are found, counted and told apart from what is around them, however a step is written."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem._core.assignment import Assignment
from jaxmem._cost.blocks.classes import plan_fingerprint
from jaxmem._cost.blocks.find import find_blocks
from jaxmem._cost.profile.profile import block_classes
from tests.shared import models, tiny_lm


def trace(build, *args, plan=None):
    return jax.jit(build(plan or Assignment.nothing())).trace(*args).jaxpr


def classes(build, *args):
    return block_classes(trace(build, *args))


SHAPES = models.shapes(3, size=4)


def linear(policy):
    """The loss without its square: its cotangents are constants."""
    layer = jax.checkpoint(models.block, policy=policy, prevent_cse=False)

    def loss(p, x):
        keys = jnp.arange(3, dtype=jnp.float32)
        return jax.lax.scan(lambda x, one: (layer(x, *one), None), x, (p, keys))[0].sum()

    return loss


def cast_outside(policy):
    inner = models.scanned(policy)
    return lambda p, x: inner(
        jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), p), x
    )


def overwritten(policy):
    """A loop that also carries a value which each iteration replaces, and none reads."""
    layer = jax.checkpoint(models.block, policy=policy, prevent_cse=False)

    def loss(p, x):
        def body(carried, one):
            y = layer(carried[0], *one)
            return (y, y), None

        keys = jnp.arange(3, dtype=jnp.float32)
        (y, last), _ = jax.lax.scan(body, (x, jnp.zeros_like(x)), (p, keys))
        return (y**2).sum() + (last**2).sum()

    return loss


def auxiliary(policy):
    layer = jax.checkpoint(models.block, policy=policy, prevent_cse=False)

    def loss(p, x):
        def body(x, one):
            y = layer(x, *one)
            return y, (y * y).sum()

        y, extra = jax.lax.scan(body, x, (p, jnp.arange(3, dtype=jnp.float32)))
        return y.sum() + extra.sum()

    return loss


@pytest.mark.parametrize(
    ("loss_of", "microbatches", "layers", "runs"),
    [
        (models.scanned, 1, 3, 3),
        (models.scanned, 2, 3, 6),
        (linear, 1, 3, 3),
        (cast_outside, 1, 3, 3),
        (auxiliary, 1, 3, 3),
        (overwritten, 1, 3, 3),
    ],
    ids=[
        "scan",
        "accumulation",
        "constant cotangents",
        "cast parameters",
        "auxiliary outputs",
        "overwritten carry",
    ],
)
def test_one_class_and_its_repeats(loss_of, microbatches, layers, runs):
    (block,) = classes(models.build_with(loss_of, microbatches), *SHAPES)
    assert (block.layers, block.runs) == (layers, runs)
    assert [t.name for t in block.tags] == list(models.TAGS)
    x = 4 // microbatches * 8 * 16 * 4
    assert [block.values[v] for v in block.inputs if block.values[v] > 4] == [x], (
        "the block's input, and no parameter"
    )
    assert sum(e.matmuls for e in block.equations) == 4, (
        "all but the last product, which no backward needs again"
    )


def test_unrolled_layers_share_a_label():
    blocks = classes(models.build_with(models.unrolled), *SHAPES)
    assert sum(b.layers for b in blocks) == 3
    assert {b.name for b in blocks} == {"block"}
    assert len(blocks) == 2, (
        "the first layer reads the step's own argument, which is in memory anyway"
    )


def by_norm(plan, clip, microbatches):
    tx = jaxmem.adama(0.1, accumulation_steps=microbatches)
    return tiny_lm.released(tx, plan=plan, clip=clip)


@pytest.mark.jax_defaults
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_second_backward_over_the_same_saved_tensors_is_no_second_block(microbatches):
    """Three layers whose gradients are first only squared, in each microbatch."""
    build = lambda clip: functools.partial(by_norm, clip=clip, microbatches=microbatches)
    state = jax.eval_shape(lambda: build(None)(None).init(tiny_lm.parameters(jnp.float32)))
    args = state, jax.ShapeDtypeStruct((8, tiny_lm.SEQUENCE + 1), jnp.int32)
    (plain,), (twice,) = classes(build(None), *args), classes(build(("norm", 1.0)), *args)
    assert (twice.layers, twice.runs) == (plain.layers, plain.runs) == (3, 3 * microbatches)
    assert (plain.backwards, twice.backwards) == (1, 2)
    # Two products in the forward, and two for each of them in a backward.
    rows = 8 // microbatches * tiny_lm.SEQUENCE
    product = 2 * rows * tiny_lm.WIDTH * 2 * tiny_lm.WIDTH
    assert plain.flops == (2 + 4) * product
    assert twice.flops == (2 + 4 + 4) * product
    repeated = sum(e.flops for e in plain.equations)
    assert sum(e.flops for e in twice.equations) == 2 * repeated > 0


@pytest.mark.jax_defaults
def test_a_second_backward_through_a_python_loop_is_no_second_block():
    def loss(params, x):
        for p in params["layers"]:
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        return ((x @ params["head"]) ** 2).mean()

    layer = {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16))}
    params, x = {"layers": [layer] * 4, "head": jnp.ones((16, 3))}, jnp.ones((8, 16))

    def found(clip):
        step = lambda plan: jaxmem.released_step(optax.adamw(0.1), loss, plan=plan, clip=clip)
        state = step(None).init(params, x)
        made = classes(lambda plan: step(plan).of(params, x), state, x)
        return sorted(made, key=lambda b: b.layers)

    product = 2 * 8 * 16 * 64
    for plain, twice in zip(found(None), found(("norm", 1.0)), strict=True):
        facts = lambda b: (b.layers, b.runs, [b.values[v] for v in b.inputs], b.fingerprint)
        assert facts(twice) == facts(plain)
        assert (plain.backwards, twice.backwards) == (1, 2)
        # The first layer's input has no gradient. No backward needs the last product again.
        gradients = 3 if plain.layers == 1 else 4
        assert twice.flops - plain.flops == gradients * product


def test_a_block_that_ends_in_the_loss():
    """Its cotangent is a number that JAX writes into the equation, and no variable."""

    def build(plan):
        def loss(w, x):
            return jnp.sum(jaxmem.tag(jnp.sin(jaxmem.tag(x @ w, "u")), "h") ** 2)

        loss = jax.checkpoint(loss, policy=jaxmem.remat_policy(plan))
        return lambda w, x: w - jax.grad(loss)(w, x)

    (block,) = classes(build, *jax.eval_shape(lambda: (jnp.zeros((8, 8)), jnp.zeros((4, 8)))))
    assert [t.name for t in block.tags] == ["u", "h"]


def build_two(plan):
    def other(x, w):
        return x + jnp.tanh(jaxmem.tag(jnp.sin(jaxmem.tag(x, "in") @ w), "h"))

    policy_of = lambda label: jaxmem.remat_policy(plan, block=label)
    first = jax.checkpoint(models.block, policy=policy_of("encoder"), prevent_cse=False)
    second = jax.checkpoint(other, policy=policy_of("decoder"), prevent_cse=False)

    def loss(p, x):
        keys = jnp.arange(3, dtype=jnp.float32)
        x, _ = jax.lax.scan(lambda x, one: (first(x, *one), None), x, (p, keys))
        x, _ = jax.lax.scan(lambda x, w: (second(x, w), None), x, p["a"][:2])
        return (x * x).sum()

    return lambda p, x: jax.tree.map(lambda a, g: a - g, p, jax.grad(loss)(p, x))


def test_two_block_classes():
    found = {b.name: b for b in classes(build_two, *SHAPES)}
    assert {n: (b.layers, [t.name for t in b.tags]) for n, b in found.items()} == {
        "encoder": (3, list(models.TAGS)),
        "decoder": (2, ["in", "h"]),
    }


def test_inside_shard_map_and_jit():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec

    def build(plan):
        loss = models.scanned(jaxmem.remat_policy(plan))
        inner = lambda p, x: jax.lax.pmean(jax.jit(loss)(p, x), "data")
        return jax.grad(jax.shard_map(inner, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))

    (block,) = classes(build, *SHAPES)
    assert block.layers == 3


def test_fingerprint_changes_with_shapes_alone():
    of = lambda build, *args: plan_fingerprint(classes(build, *args))
    build = models.build_with(models.scanned)
    assert of(build, *SHAPES) == of(models.build_with(linear), *SHAPES)
    for other in (models.shapes(3, size=8), models.shapes(4, size=4)):
        assert of(build, *SHAPES) != of(build, *other)


def test_a_step_without_blocks_says_what_to_wrap():
    with pytest.raises(jaxmem.errors.StepError, match="jax.checkpoint"):
        classes(models.build_with(lambda policy: models.scanned(None)), *SHAPES)
    with pytest.raises(jaxmem.errors.StepError, match="no gradient is taken"):
        classes(lambda plan: models.scanned(jaxmem.remat_policy(plan)), *SHAPES)


def test_names_outside_blocks_are_seen():
    def loss_of(policy):
        inner = models.scanned(policy)
        return lambda p, x: inner(p, jaxmem.tag(x, "embedding"))

    assert "embedding" in find_blocks(trace(models.build_with(loss_of), *SHAPES).jaxpr).tag_names


def test_blocks_of_two_labels_that_read_the_same_values_are_two_classes():
    """As the energy and the forces of a loss read the same positions."""

    def build(plan):
        def layer(x, w):
            return jnp.sin(jaxmem.tag(x @ w, "product"))

        policies = [jaxmem.remat_policy(plan, block=label) for label in ("energy", "forces")]
        energy, forces = [jax.checkpoint(layer, policy=policy) for policy in policies]

        def step(w, x):
            return jax.grad(lambda w: jnp.sum(energy(x, w)) + jnp.sum(forces(x, w) ** 2))(w)

        return step

    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
    assert {block.name for block in classes(build, *shapes)} == {"energy", "forces"}

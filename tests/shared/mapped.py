"""Layers with attention inside `jax.shard_map`, as in large models. Each function takes a mesh with
the axes data, fsdp and tensor, and a function that tags.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem

AXES, SIZES = ("data", "fsdp", "tensor"), (2, 2, 2)
BATCH, SEQUENCE, WIDTH, LAYERS = 8, 16, 64, 3
ROWS = P(("data", "fsdp"), None, None)  # the division of the batch
PARTS = P(("data", "fsdp"), None, "tensor")
RING = P(("data", "fsdp"), "tensor", None)
SHAPES = {
    "q": (LAYERS, WIDTH, WIDTH),
    "up": (LAYERS, WIDTH, 2 * WIDTH),
    "down": (LAYERS, 2 * WIDTH, WIDTH),
}
X = BATCH, SEQUENCE, WIDTH


def mesh(kind=AxisType.Auto) -> AbstractMesh:
    return AbstractMesh(SIZES, AXES, axis_types=(kind,) * 3)


def untagged(x, name, kind=None):
    return x


def attention(x, tag):
    """Attention of each row to all rows, in this device's part of the features."""
    tagged = functools.partial(jaxmem.ops.softmax, name="probs")
    softmax = tagged if tag is jaxmem.tag else jax.nn.softmax
    probs = softmax(x @ x.swapaxes(-1, -2))
    return jnp.tanh(tag(probs @ x, "ctx", kind="linear"))


def wholly(mesh, tag, check):
    return inside(mesh, attention, tag, PARTS, check)


def partly(mesh, tag, check):
    """XLA divides by fsdp and tensor."""
    return inside(mesh, attention, tag, P("data"), check, axis_names={"data"})


def by_tensor(mesh, tag, check):
    """XLA divides the batch, and thereby the tensors inside."""
    return inside(mesh, attention, tag, P(None, None, "tensor"), check, axis_names={"tensor"})


def summed(mesh, tag, check):
    def all_features(x, tag):
        scores = tag(jax.lax.psum(x @ x.swapaxes(-1, -2), "tensor") / 16, "probs")
        every = jax.lax.all_gather(x, "tensor", axis=2, tiled=True)
        at = jax.lax.axis_index("tensor") * x.shape[-1]
        mixed = jax.lax.dynamic_slice_in_dim(jnp.tanh(scores) @ every, at, x.shape[-1], 2)
        return jnp.tanh(tag(mixed, "ctx", kind="linear"))

    return inside(mesh, all_features, tag, PARTS, check)


def ring(mesh, tag, check):
    """Each device sends its part of the sequence to the next device."""

    def turns(x, tag):
        def turn(carry, _):
            k, seen = carry
            scores = tag(x @ k.swapaxes(-1, -2) / 16, "probs", kind="linear")
            seen += jnp.tanh(scores) @ k
            return (jax.lax.ppermute(k, "tensor", [(0, 1), (1, 0)]), seen), None

        (_, seen), _ = jax.lax.scan(turn, (x, jnp.zeros_like(x)), None, length=2)
        return jnp.tanh(tag(seen, "ctx", kind="linear"))

    return inside(mesh, turns, tag, RING, check)


def ruled(mesh, tag, check):
    """Attention with a derivative rule of its own."""

    @jax.custom_vjp
    def attend(x):
        return jnp.tanh(x @ x.swapaxes(-1, -2) / 16) @ x

    def forward(x):
        scores = jnp.tanh(x @ x.swapaxes(-1, -2) / 16)
        return scores @ x, (x, scores)

    def backward(saved, g):
        x, scores = saved
        inner = g @ x.swapaxes(-1, -2) * (1 - scores * scores) / 16
        return (scores.swapaxes(-1, -2) @ g + inner @ x + inner.swapaxes(-1, -2) @ x,)

    attend.defvjp(forward, backward)
    named = jaxmem.ops.name_residuals(attend, "probs") if tag is jaxmem.tag else attend
    own = lambda x, tag: jnp.tanh(tag(named(x), "ctx", kind="linear"))
    return inside(mesh, own, tag, PARTS, check)


def mapped_loss(mesh, tag):
    """Returns a `build` with the loss in a `shard_map` over data, and the attention in another
    `shard_map` inside.
    """

    def build(plan):
        own = functools.partial(attention, tag=tag)
        heads = P(None, None, "tensor")
        over = {"in_specs": heads, "out_specs": heads, "axis_names": {"tensor"}}

        layer = layer_with(lambda x: jax.shard_map(own, check_vma=False, **over)(x), tag)
        policy = jaxmem.remat_policy(plan)
        planned = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        block = planned if tag is jaxmem.tag else layer

        def loss(w, x):
            return jax.lax.pmean((jax.lax.scan(block, x, w)[0] ** 2).mean(), "data")

        over_data = {"in_specs": (P(), P("data")), "out_specs": P(), "axis_names": {"data"}}
        return stepping(jax.shard_map(loss, mesh=mesh, check_vma=False, **over_data))

    return build


def layer_with(attended, tag):
    def layer(x, w):
        x = x + attended(tag(x @ w["q"], "q", kind="linear"))
        return x + jax.nn.gelu(tag(x @ w["up"], "up", kind="linear")) @ w["down"], None

    return layer


def stepping(loss):
    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradient), value

    return step


def inside(mesh, function, tag, spec, check, **axes):
    """Returns `function` of an array and `tag`, under a `shard_map`."""
    own = functools.partial(function, tag=tag)
    mapped = jax.shard_map(own, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check, **axes)
    if AxisType.Explicit not in mesh.axis_types:
        return mapped
    typed = lambda spec: NamedSharding(getattr(mesh, "abstract_mesh", mesh), spec)
    typed_spec = ROWS if spec == P("data") else PARTS if spec == P(None, None, "tensor") else spec
    there = lambda x: jax.sharding.reshard(x, typed(typed_spec))
    return lambda x: jax.sharding.reshard(mapped(there(x)), typed(ROWS))


def build_with(attend, mesh, *, check=False, looped=True, tag=jaxmem.tag, own=False):
    """Returns a `build`. Without tags, its layers are under no checkpoint of jaxmem.

    attend: one of the functions above.
    check: `check_vma` of the `shard_map`.
    looped: whether `jax.lax.scan` loops over the layers.
    own: whether untagged layers are under the user's own checkpoint.
    """

    def build(plan):
        layer = layer_with(attend(mesh, tag, check), tag)
        block = jax.checkpoint(layer) if own else layer
        if tag is jaxmem.tag:
            block = jax.checkpoint(layer, policy=jaxmem.remat_policy(plan), prevent_cse=not looped)

        def loss(w, x):
            if looped:
                return (jax.lax.scan(block, x, w)[0] ** 2).mean()
            for i in range(LAYERS):
                x, _ = block(x, jax.tree.map(lambda a: a[i], w))  # noqa: B023
            return (x**2).mean()

        return stepping(loss)

    return build


def shapes(mesh, dtype=jnp.float32):
    of = lambda size, spec: jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))
    return {name: of(size, P()) for name, size in SHAPES.items()}, of(X, ROWS)

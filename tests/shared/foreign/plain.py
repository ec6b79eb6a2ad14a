"""Models in plain JAX in the style of other projects, without tags. Each function returns (loss,
parameters, other arguments).

Every parameter has a gradient, in the dtype of `Size`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tests.shared.foreign.size import SMALL, Size, cross_entropy, normal, tokens


def attention(x, p, heads: int, memory=None, causal=True):
    split = lambda a: a.reshape(*a.shape[:-1], heads, -1)
    memory = x if memory is None else memory
    # Keys have no bias: it would not change the softmax, so its gradient would be rounding error.
    q, k, v = split(x @ p["q"] + p["bq"]), split(memory @ p["k"]), split(memory @ p["v"] + p["bv"])
    return mixed(q, k, v, causal_mask(x) if causal else None).reshape(x.shape) @ p["o"]


def causal_mask(x):
    return jnp.tril(jnp.ones((x.shape[1],) * 2, bool))


def mixed(q, k, v, mask=None):
    """The values, averaged over the positions that `mask` leaves; arrays of (batch, sequence,
    heads, width).
    """
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v)


def rms(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def gemma_layer(x, p, heads: int = SMALL.heads):
    """Two RMS norms, attention, and a gated feed-forward."""
    return gated(x + attention(rms(x, p["norm1"]), p, heads), p)


def gated(x, p):
    h = rms(x, p["norm2"])
    return x + (jax.nn.gelu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def layer_parameters(s: Size = SMALL, seed=0, stack: tuple[int, ...] = ()):
    d = s.width
    shapes = dict.fromkeys("qkvo", (d, d)) | dict.fromkeys(("bq", "bv", "norm1", "norm2"), (d,))
    shapes |= {"gate": (d, 2 * d), "up": (d, 2 * d), "down": (2 * d, d)}
    scale = 1.1 / d**0.5
    return {
        n: normal(seed + i, *stack, *shape, scale=scale, dtype=s.dtype) + float("norm" in n)
        for i, (n, shape) in enumerate(shapes.items())
    }


def stacked_parameters(s: Size):
    """Returns the layers' parameters, stacked along a leading axis, and the embedding."""
    layers = layer_parameters(s, stack=(s.layers,))
    return {"layers": layers, "embedding": normal(7, s.vocab, s.width, dtype=s.dtype)}


def in_a_scan(s: Size, layer):
    """Returns a language model with a scan over `layer`."""

    def loss(params, batch):
        x = params["embedding"][batch[:, :-1]]
        x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
        return cross_entropy(x @ params["embedding"].T, batch[:, 1:])

    return loss, stacked_parameters(s), (tokens(s),)


def gemma_in_a_loop(s: Size = SMALL):
    layers = [layer_parameters(s, 100 * i) for i in range(s.layers)]
    params = {"layers": layers, "embedding": normal(7, s.vocab, s.width, dtype=s.dtype)}

    def loss(params, batch):
        x = params["embedding"][batch[:, :-1]]
        for p in params["layers"]:
            x = gemma_layer(x, p, s.heads)
        return cross_entropy(x @ params["embedding"].T, batch[:, 1:])

    return loss, params, (tokens(s),)


def gemma_in_a_scan(s: Size = SMALL):
    return in_a_scan(s, functools.partial(gemma_layer, heads=s.heads))


def gemma_in_a_scan_of_checkpoints(s: Size = SMALL):
    return in_a_scan(s, jax.checkpoint(functools.partial(gemma_layer, heads=s.heads)))


def microbatches_with_a_chunked_loss(s: Size = SMALL):
    chunks = 4

    def loss(params, batches):
        def one(total, batch):
            x = params["embedding"][batch[:, :-1]]
            layer = lambda x, p: (gemma_layer(x, p, s.heads), None)
            x, _ = jax.lax.scan(layer, x, params["layers"])
            parts = x.reshape(chunks, -1, s.width), batch[:, 1:].reshape(chunks, -1)

            @jax.checkpoint
            def chunk(sum_, xy):
                return sum_ + cross_entropy(xy[0] @ params["embedding"].T, xy[1]), None

            return total + jax.lax.scan(chunk, jnp.zeros((), s.dtype), parts)[0], None

        return jax.lax.scan(one, jnp.zeros((), s.dtype), batches)[0]

    return loss, stacked_parameters(s), (jnp.stack([tokens(s), tokens(s, 1)]),)


def names_twice_in_a_layer(s: Size = SMALL):
    """Uses one `checkpoint_name` twice in a layer, as MaxText does."""

    def layer(x, p):
        named = functools.partial(checkpoint_name, name="projection")
        h = rms(x, p["norm1"])
        x = x + named(attention(h, p, s.heads))
        h = rms(x, p["norm2"])
        up = checkpoint_name(jax.nn.gelu(h @ p["gate"]) * (h @ p["up"]), "mlpwi")
        return x + named(up @ p["down"])

    return in_a_scan(s, layer)


def on_a_mesh_of_eight(s: Size = SMALL):
    """Divides parameters over both axes of a 4 x 2 mesh, and batch and activations over the first
    axis. Arguments are shapes, since the devices are absent.
    """
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    at = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))

    def layer(x, p):
        x = jax.lax.with_sharding_constraint(x, at("data", None, None))
        return gemma_layer(x, p, s.heads)

    def put(path, a):
        wide = path[-1].key in ("q", "k", "v", "gate", "up")
        axes = (("data", "model") if wide else ("model", "data")) if a.ndim == 3 else ()
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at(None, *axes))

    loss, params, (batch,) = in_a_scan(s, layer)
    params = jax.tree_util.tree_map_with_path(put, params)
    rows = jax.ShapeDtypeStruct(batch.shape, batch.dtype, sharding=at("data"))
    return loss, params, (rows,)


def mixture_of_experts(s: Size = SMALL):
    """Experts by einsum over a dispatch of one-hot masks, as in GShard."""
    experts, d = 4, s.width
    draw = functools.partial(normal, scale=1.1 / d**0.5, dtype=s.dtype)
    params = {
        "layers": {
            "router": draw(1, s.layers, d, experts),
            "up": draw(2, s.layers, experts, d, 2 * d),
            "down": draw(3, s.layers, experts, 2 * d, d),
        },
        "head": draw(4, d, s.vocab),
        "embedding": draw(5, s.vocab, d),
    }

    def layer(x, p):
        gates = jax.nn.softmax(x @ p["router"])
        chosen = jax.nn.one_hot(gates.argmax(-1), experts, dtype=x.dtype)
        routed = jnp.einsum("bse,bsd->ebsd", chosen, x)
        h = jax.nn.relu(jnp.einsum("ebsd,edf->ebsf", routed, p["up"]))
        out = jnp.einsum("ebsf,efd->ebsd", h, p["down"])
        return x + jnp.einsum("ebsd,bse->bsd", out, chosen * gates), (gates.mean((0, 1)) ** 2).sum()

    def loss(params, batch):
        x = params["embedding"][batch[:, :-1]]
        x, balance = jax.lax.scan(layer, x, params["layers"])
        return cross_entropy(x @ params["head"], batch[:, 1:]) + 0.01 * balance.sum()

    return loss, params, (tokens(s),)


def encoder_and_decoder(s: Size = SMALL):
    """Two scans. The second scan attends to the output of the first."""
    params = stacked_parameters(s)
    params["decoder"] = layer_parameters(s, 50, (s.layers,))
    params["across"] = layer_parameters(s, 90, (s.layers,))
    params["across"] = {n: params["across"][n] for n in ("q", "k", "v", "o", "bq", "bv", "norm1")}

    def encode(x, p):
        return gated(x + attention(rms(x, p["norm1"]), p, s.heads, causal=False), p), None

    def loss(params, source, batch):
        memory, _ = jax.lax.scan(encode, params["embedding"][source[:, :-1]], params["layers"])

        def decode(x, p):
            own, across = p
            x = x + attention(rms(x, own["norm1"]), own, s.heads)
            h = rms(x, across["norm1"])
            return gated(x + attention(h, across, s.heads, memory, causal=False), own), None

        x = params["embedding"][batch[:, :-1]]
        x, _ = jax.lax.scan(decode, x, (params["decoder"], params["across"]))
        return cross_entropy(x @ params["embedding"].T, batch[:, 1:])

    return loss, params, (tokens(s, 1), tokens(s))


def recurrent_over_time(s: Size = SMALL):
    draw = functools.partial(normal, scale=1.1 / s.width**0.5, dtype=s.dtype)
    d = s.width
    params = {"in": draw(0, d, d), "cell": draw(1, d, d), "bias": draw(2, d), "out": draw(3, d, 1)}

    def loss(params, xs):
        def cell(h, x):
            h = jnp.tanh(x @ params["in"] + h @ params["cell"] + params["bias"])
            return h, h

        _, hs = jax.lax.scan(cell, jnp.zeros((s.batch, d), xs.dtype), xs)
        return ((hs @ params["out"]) ** 2).mean()

    return loss, params, (normal(4, s.sequence, s.batch, d, scale=1.0, dtype=s.dtype),)


def under_cond(s: Size = SMALL):
    inner, params, args = gemma_in_a_scan(s)

    def loss(params, batch):
        return jax.lax.cond(batch.sum() > 0, inner, lambda p, b: 0.0 * inner(p, b), params, batch)

    return loss, params, args


def under_vmap(s: Size = SMALL):
    inner, params, (batch,) = gemma_in_a_scan(s)

    def loss(params, batch):
        return jax.vmap(lambda row: inner(params, row[None]))(batch).mean()

    return loss, params, (batch,)


def under_shard_map(s: Size = SMALL):
    inner, params, (batch,) = gemma_in_a_scan(s)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec

    def loss(params, batch):
        mean = lambda p, b: jax.lax.pmean(inner(p, b), "data")
        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        return jax.shard_map(mean, mesh=mesh, **specs)(params, batch)

    return loss, params, (batch,)


def sharded_jit(s: Size = SMALL):
    inner, params, (batch,) = gemma_in_a_scan(s)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(inner, in_shardings=(everywhere, everywhere)), params, (batch,)

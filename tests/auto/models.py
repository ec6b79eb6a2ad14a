"""Models as others write them, without a tag: each is (loss, parameters, other arguments).

They are small, in float64 where the library allows it, and every parameter has a gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np

D, HEADS, LAYERS, BATCH, SEQUENCE, VOCAB = 32, 4, 3, 2, 12, 48


def normal(seed: int, *shape, scale=0.2):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale)


def perturbed(tree):
    """No parameter is zero or one, so that no gradient vanishes for that."""
    leaves, structure = jax.tree.flatten(tree)
    moved = [a + normal(i, *a.shape, scale=0.05) for i, a in enumerate(leaves)]
    return jax.tree.unflatten(structure, moved)


def tokens(seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, (BATCH, SEQUENCE + 1)))


def cross_entropy(logits, labels):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -picked.mean()


def attention(x, p):
    split = lambda a: a.reshape(*a.shape[:-1], HEADS, -1)
    # No bias on keys: a softmax does not see it, so its gradient is zero but for rounding.
    q, k, v = split(x @ p["q"] + p["bq"]), split(x @ p["k"]), split(x @ p["v"] + p["bv"])
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), scores, -1e9)
    mixed = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v)
    return mixed.reshape(x.shape) @ p["o"]


def rms(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def gemma_layer(x, p):
    """Two RMS norms, attention, and a gated feed-forward."""
    x = x + attention(rms(x, p["norm1"]), p)
    h = rms(x, p["norm2"])
    return x + (jax.nn.gelu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def gemma_layer_parameters(seed=0, *stack):
    shapes = dict.fromkeys("qkvo", (D, D)) | dict.fromkeys(("bq", "bv", "norm1", "norm2"), (D,))
    shapes |= {"gate": (D, 2 * D), "up": (D, 2 * D), "down": (2 * D, D)}
    return {
        n: normal(seed + i, *stack, *s) + float(n.startswith("norm"))
        for i, (n, s) in enumerate(shapes.items())
    }


def gemma_in_a_loop():
    layers = [gemma_layer_parameters(100 * i) for i in range(LAYERS)]
    params = {"layers": layers, "embedding": normal(7, VOCAB, D)}

    def loss(params, batch):
        x = params["embedding"][batch[:, :-1]]
        for p in params["layers"]:
            x = gemma_layer(x, p)
        return cross_entropy(x @ params["embedding"].T, batch[:, 1:])

    return loss, params, (tokens(),)


def gemma_in_a_scan(checkpoint=False):
    params = {"layers": gemma_layer_parameters(0, LAYERS), "embedding": normal(7, VOCAB, D)}
    layer = jax.checkpoint(gemma_layer) if checkpoint else gemma_layer

    def loss(params, batch):
        x = params["embedding"][batch[:, :-1]]
        x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
        return cross_entropy(x @ params["embedding"].T, batch[:, 1:])

    return loss, params, (tokens(),)


def microbatches_with_a_chunked_loss():
    _, params, (batch,) = gemma_in_a_scan()

    def loss(params, batches):
        def one(total, batch):
            x = params["embedding"][batch[:, :-1]]
            x, _ = jax.lax.scan(lambda x, p: (gemma_layer(x, p), None), x, params["layers"])
            chunks = x.reshape(4, -1, D), batch[:, 1:].reshape(4, -1)

            @jax.checkpoint
            def chunk(sum_, xy):
                return sum_ + cross_entropy(xy[0] @ params["embedding"].T, xy[1]), None

            return total + jax.lax.scan(chunk, jnp.zeros(()), chunks)[0], None

        return jax.lax.scan(one, jnp.zeros(()), batches)[0]

    return loss, params, (jnp.stack([batch, tokens(1)]),)


def mixture_of_experts():
    """Experts by einsum over a dispatch of one-hot masks, as in GShard."""
    experts = 4
    params = {
        "layers": {
            "router": normal(1, LAYERS, D, experts),
            "up": normal(2, LAYERS, experts, D, 2 * D),
            "down": normal(3, LAYERS, experts, 2 * D, D),
        },
        "head": normal(4, D, VOCAB),
        "embedding": normal(5, VOCAB, D),
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

    return loss, params, (tokens(),)


def recurrent_over_time():
    params = {
        "in": normal(0, D, D),
        "cell": normal(1, D, D),
        "bias": normal(2, D),
        "out": normal(3, D, 1),
    }

    def loss(params, xs):
        def cell(h, x):
            h = jnp.tanh(x @ params["in"] + h @ params["cell"] + params["bias"])
            return h, h

        _, hs = jax.lax.scan(cell, jnp.zeros((BATCH, D), xs.dtype), xs)
        return ((hs @ params["out"]) ** 2).mean()

    return loss, params, (normal(4, SEQUENCE, BATCH, D, scale=1.0),)


def under_cond():
    inner, params, args = gemma_in_a_scan()

    def loss(params, batch):
        return jax.lax.cond(batch.sum() > 0, inner, lambda p, b: 0.0 * inner(p, b), params, batch)

    return loss, params, args


def under_vmap():
    inner, params, (batch,) = gemma_in_a_scan()

    def loss(params, batch):
        return jax.vmap(lambda row: inner(params, row[None]))(batch).mean()

    return loss, params, (batch,)


def under_shard_map():
    inner, params, (batch,) = gemma_in_a_scan()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec

    def loss(params, batch):
        mean = lambda p, b: jax.lax.pmean(inner(p, b), "data")
        return jax.shard_map(mean, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(
            params, batch
        )

    return loss, params, (batch,)


def sharded_jit():
    inner, params, (batch,) = gemma_in_a_scan()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(inner, in_shardings=(everywhere, everywhere)), params, (batch,)

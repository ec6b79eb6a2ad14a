"""Training steps of dense decoders that others measured, rebuilt from their dimensions: MaxText's
decoder as its rows in `benchmarks/published.json` describe it.

A row names the numbers of layers, heads and features, the mesh, the rematerialization, and the
attention. Weights are float32, and layers compute in bfloat16. A scan runs over the layers.

Shapes: B batch, S sequence, E width, H heads of queries, G heads of keys and values, K head_dim,
F features between the products of the MLP, V vocabulary, L layers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.models import llama
from tests.shared import meshes

AXES = "data", "fsdp", "fsdp_transpose", "tensor"
ROWS = "data", "fsdp", "fsdp_transpose"  # axes that divide the batch
# libtpu's flags by MaxText's names for them; of others, today's libtpu has or refuses the values.
FLAGS = {
    "DENSE_VMEM_LIMIT": "--xla_tpu_scoped_vmem_limit_kib=98304",
    "DISABLE_COLLECTIVE_MATMUL": "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
    "LAYOUT_FOR_ALL_REDUCE_SCATTER": "--xla_tpu_use_minor_sharding_for_major_trivial_input=true"
    " --xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1"
    " --xla_tpu_assign_all_reduce_scatter_layout=true",
    "DATA_PARALLEL_OVERLAP": "--xla_tpu_enable_data_parallel_all_reduce_opt=true"
    " --xla_tpu_data_parallel_opt_different_sized_ops=true",
}

Row = dict[str, Any]


def step_of(row: Row) -> tuple[Callable, tuple]:
    """`build`, as `jaxmem.plan` takes it, and the shapes of the state and of the batch."""
    sizes = {axis: row["parallelism"].get(axis, 1) for axis in AXES}
    mesh = AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    tx, params = optimizer(row), parameters_of(row, mesh)
    whole = lambda a: meshes.shape(a, mesh)
    as_divided = lambda a, p: meshes.shape(a, mesh, p.sharding.spec)
    moments = jax.eval_shape(tx.init, params)
    moments = optax.tree.map_params(tx, as_divided, moments, params, transform_non_params=whole)
    tokens = jax.ShapeDtypeStruct((row["global_batch"], row["sequence"] + 1), jnp.int32)

    def build(_):
        def step(state, tokens):
            params, moments = state
            loss = functools.partial(loss_of, row, mesh)
            value, gradient = jax.value_and_grad(loss)(params, tokens)
            updates, moments = tx.update(gradient, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        return step

    return build, ((params, moments), meshes.shape(tokens, mesh, P(ROWS)))


def flags_of(row: Row) -> str:
    """libtpu's flags of a row, as LIBTPU_INIT_ARGS has them."""
    return " ".join(flag for name, flag in FLAGS.items() if name in row["compiler_flags"])


def optimizer(row: Row) -> optax.GradientTransformation:
    decay = 0.1 if "wd .1" in row["optimizer"] else 0.0
    adam = optax.adamw(3e-4, 0.9, 0.95, weight_decay=decay)
    clip = optax.clip_by_global_norm(1.0) if "clip" in row["optimizer"] else optax.identity()
    return optax.chain(clip, adam)


def parameters_of(row: Row, mesh: AbstractMesh) -> dict[str, Any]:
    """The shapes of the parameters, divided over the mesh by MaxText's rules."""
    m = row["model"]
    L, E, K, F, V = m["layers"], m["width"], m["head_dim"], m["ffn"], m["vocab"]
    width, wide = ("fsdp", "fsdp_transpose"), ("fsdp_transpose", "tensor")
    heads, features = P(None, width, "tensor"), P(None, "fsdp", wide)
    gates = ("wi_0", "wi_1") if gated(row) else ("wi_0",)
    layers = dict.fromkeys(gates, ((L, E, F), features)) | {
        "query": ((L, E, m["heads"], K), heads),
        "key": ((L, E, m["kv_heads"], K), heads),
        "value": ((L, E, m["kv_heads"], K), heads),
        "out": ((L, m["heads"], K, E), P(None, "tensor", None, width)),
        "wo": ((L, F, E), P(None, wide, "fsdp")),
        "norm1": ((L, E), P()),
        "norm2": ((L, E), P()),
    }
    outer = {"embedding": ((V, E), P("tensor", width)), "norm": ((E,), P())}
    outer |= {} if m["tied_embeddings"] else {"head": ((E, V), P(width, "tensor"))}
    shape = lambda size, spec: meshes.shape(jax.ShapeDtypeStruct(size, jnp.float32), mesh, spec)
    every = lambda arrays: {name: shape(*one) for name, one in arrays.items()}
    return every(outer) | {"layers": every(layers)}


def gated(row: Row) -> bool:
    return "gated" in row["model"]["mlp"]


def loss_of(row: Row, mesh, params, tokens):
    """The mean loss in nats per token."""
    # MaxText's rules divide the features of every activation, or its heads, by the axis "tensor".
    features, heads = P(ROWS, None, "tensor"), P(ROWS, None, "tensor", None)
    divided = lambda x, spec=features: jax.lax.with_sharding_constraint(
        x, NamedSharding(mesh, spec)
    )
    half = functools.partial(jax.tree.map, lambda a: a.astype(jnp.bfloat16))

    def layer(x, w):
        w = half(w)
        x = checkpoint_name(x, "decoder_layer_input")
        n = norm(x, w["norm1"])
        product = lambda name: divided(jnp.einsum("bse,ehk->bshk", n, w[name]), heads)
        q = checkpoint_name(rotated(product("query")), "query_proj")
        k = checkpoint_name(rotated(product("key")), "key_proj")
        v = checkpoint_name(product("value"), "value_proj")
        a = checkpoint_name(attention(row, mesh, q, k, v), "context")
        out = jnp.einsum("bshk,hke->bse", a, w["out"])
        x = x + checkpoint_name(divided(out), "out_proj")
        n = norm(x, w["norm2"])
        wide = checkpoint_name(divided(n @ w["wi_0"]), "mlpwi_0")
        if gated(row):
            wide = jax.nn.silu(wide) * checkpoint_name(divided(n @ w["wi_1"]), "mlpwi_1")
        else:
            wide = jax.nn.relu(wide)
        x = x + checkpoint_name(divided(wide @ w["wo"]), "mlpwo")
        return divided(x), None

    layer = jax.checkpoint(layer, policy=policy_of(row), prevent_cse=False)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    embedding = params["embedding"].astype(jnp.bfloat16)
    if "use_iota_embed" in row["notes"]:
        x = jax.nn.one_hot(inputs, embedding.shape[0], dtype=jnp.bfloat16) @ embedding
    else:
        x = embedding[inputs]
    x, _ = jax.lax.scan(layer, divided(x), params["layers"])
    x = norm(x, params["norm"].astype(jnp.bfloat16))
    head = embedding.T if row["model"]["tied_embeddings"] else params["head"].astype(jnp.bfloat16)
    logits = divided(x @ head).astype(jnp.float32)
    # By a one-hot array, as MaxText does. XLA fuses it, and would not fuse the scatter that is the
    # backward of an index.
    chosen = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    return (jax.nn.logsumexp(logits, -1) - (chosen * logits).sum(-1)).mean()


def norm(x, scale):
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale


def rotated(x):
    """Rotary positions, of (B, S, H, K)."""
    return llama.rotated(x.reshape(*x.shape[:2], -1), x.shape[3], 10_000.0).reshape(x.shape)


OFFLOADED = "decoder_layer_input", "query_proj", "key_proj", "value_proj", "out_proj"


def policy_of(row: Row):
    """The policy of `jax.checkpoint` that a row describes."""
    policies = {
        "full": jax.checkpoint_policies.nothing_saveable,
        "minimal": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
        "custom: the named tensors offloaded": offloading((), OFFLOADED),
        "qkv_proj_offloaded": offloading((), OFFLOADED[1:4]),
        "save_dot_except_mlpwi": offloading((*OFFLOADED[1:], "mlpwo"), ()),
    }
    return next(policy for name, policy in policies.items() if row["remat"].startswith(name))


def offloading(saved: Sequence[str], offloaded: Sequence[str]):
    """The policy of `jax.checkpoint` that keeps some named tensors, and offloads others."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )


def attention(row: Row, mesh, q, k, v):
    """Causal attention, (B, S, H, K)."""
    kind = row["attention"].split()[0].rstrip(",")
    if kind == "dot":
        scores = jnp.einsum("bqhk,bthk->bhqt", q, k) * q.shape[-1] ** -0.5
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        probs = jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -1e9)).astype(q.dtype)
        return jnp.einsum("bhqt,bthk->bqhk", probs, v)
    spec = P(ROWS, "tensor")
    run = flash if kind == "flash" else functools.partial(splash, row)
    run = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    heads_first = lambda a: a.transpose(0, 2, 1, 3)
    return heads_first(run(*map(heads_first, (q, k, v))))


def flash(q, k, v):
    """JAX's first flash attention for TPUs, of (B, H, S, K)."""
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    block = min(512, q.shape[2])
    names = (
        "block_q", "block_k_major", "block_k", "block_q_major_dkv", "block_k_major_dkv",
        "block_k_dkv", "block_q_dkv", "block_k_major_dq", "block_k_dq", "block_q_dq",
    )  # fmt: skip
    blocks: dict[str, Any] = dict.fromkeys(names, block)
    sizes = BlockSizes(block_b=1, **blocks)
    return flash_attention(q, k, v, causal=True, sm_scale=q.shape[3] ** -0.5, block_sizes=sizes)


def splash(row: Row, q, k, v):
    """JAX's splash attention for TPUs, of q (B, H, S, K) and k, v (B, G, S, K). Its blocks have
    2048 positions if all blocks of the row have, else 512.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    (B, H, S, K), G = q.shape, k.shape[1]
    block = min(2048 if "blocks 2048" in row["attention"] else 512, S)
    names = (
        "block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv",
        "block_kv_dkv_compute",
    )  # fmt: skip
    fused = "fused backward" in row["attention"]
    more = () if fused else ("block_q_dq", "block_kv_dq")
    blocks: dict[str, Any] = dict.fromkeys((*names, *more), block)
    sizes = kernel.BlockSizes(**blocks, use_fused_bwd_kernel=fused)
    # H / G heads of queries share a head of keys and values.
    mask = masks.MultiHeadMask([masks.CausalMask((S, S)) for _ in range(H // G)])
    make: Any = kernel.make_splash_mqa
    run = make(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    grouped = (q * K**-0.5).reshape(B, G, H // G, S, K)
    return jax.vmap(jax.vmap(run))(grouped, k, v).reshape(q.shape)

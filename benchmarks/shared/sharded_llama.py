"""A Llama of a billion parameters as a user of MaxText would write it: layers in a scan, parameters
and moments divided over every chip (FSDP), one sequence of 1024 tokens for each of two a chip.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem

LAYERS, WIDTH, HIDDEN, HEADS, VOCAB, LENGTH, EACH = 16, 2048, 5632, 16, 32768, 1024, 2
AXIS = "fsdp"


def norm(x_BTD, scale_D):
    mean_BT1 = jnp.mean(jnp.square(x_BTD.astype(jnp.float32)), -1, keepdims=True)
    return (x_BTD * jax.lax.rsqrt(mean_BT1 + 1e-6).astype(x_BTD.dtype)) * scale_D


def layer(x_BTD, w):
    w = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)
    x_BTD = jaxmem.tag(x_BTD, "in", kind="residual")
    h_BTD = jaxmem.tag(norm(x_BTD, w["ln1"]), "ln1", kind="norm")
    qkv_BTF = jaxmem.tag(h_BTD @ w["qkv"], "qkv", kind="qkv")
    split = [a.reshape(*a.shape[:2], HEADS, -1) for a in jnp.split(qkv_BTF, 3, -1)]
    out_BTD = jax.nn.dot_product_attention(*split, is_causal=True).reshape(x_BTD.shape)
    out_BTD = jaxmem.tag(out_BTD, "attn", kind="linear")
    x_BTD = jaxmem.tag(x_BTD + out_BTD @ w["out"], "mid", kind="residual")
    h_BTD = jaxmem.tag(norm(x_BTD, w["ln2"]), "ln2", kind="norm")
    gate_BTF = jaxmem.tag(h_BTD @ w["gate"], "gate", kind="linear")
    up_BTF = jaxmem.tag(h_BTD @ w["up"], "up", kind="linear")
    return x_BTD + (jax.nn.silu(gate_BTF) * up_BTF) @ w["down"]


def build_and_arguments(devices: int):
    """(`build`, its arguments' shapes), divided over so many devices."""
    mesh = AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))

    def shape(sizes, *spec, dtype: Any = jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P(*spec)))

    sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "gate": (WIDTH, HIDDEN)}
    sizes |= {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    layers = {name: shape((LAYERS, *size), None, AXIS) for name, size in sizes.items()}
    layers |= {name: shape((LAYERS, WIDTH)) for name in ("ln1", "ln2")}
    params = {"embed": shape((VOCAB, WIDTH), None, AXIS), "layers": layers}
    tx = optax.adam(1e-4)
    first, *rest = jax.eval_shape(tx.init, params)
    count = shape((), dtype=jnp.int32)
    state = params, (first._replace(count=count, mu=params, nu=params), *rest)
    tokens = shape((EACH * devices, LENGTH), AXIS, dtype=jnp.int32)
    batch = NamedSharding(mesh, P(AXIS))

    def build(plan):
        policy: Any = jaxmem.remat_policy(plan)

        def loss(params, tokens_BT):
            embed_VD = params["embed"].astype(jnp.bfloat16)
            x_BTD = jax.lax.with_sharding_constraint(embed_VD[tokens_BT], batch)
            run = jax.checkpoint(layer, policy=policy, prevent_cse=False)
            x_BTD, _ = jax.lax.scan(lambda x, w: (run(x, w), None), x_BTD, params["layers"])
            logits_BTV = (x_BTD @ embed_VD.T).astype(jnp.float32)
            own = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BT)
            return own.mean()

        def step(state, tokens_BT):
            params, moments = state
            value, gradients = jax.value_and_grad(loss)(params, tokens_BT)
            updates, moments = tx.update(gradients, moments)
            return (optax.apply_updates(params, updates), moments), value

        return step

    return build, (state, tokens)

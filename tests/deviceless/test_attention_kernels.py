"""JAX's own attention kernels for TPUs, in a model without a tag: a plan that keeps what a kernel
saves does not run it again, and its time tells.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem._core.actions import KEEP
from jaxmem._model.auto.found_layers import found_layers
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem._target.hlo.kernels import kernel_flops
from jaxmem._trace.jaxpr import equations
from jaxmem._trace.step import trace
from jaxmem.plans import Assignment

pytestmark = [pytest.mark.jax_defaults, pytest.mark.slow]

LAYERS, BATCH, HEADS, ROWS, DEPTH = 4, 2, 4, 1024, 128
WIDTH = HEADS * DEPTH
PARAMS = {n: jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16) for n in "qkvo"}
X = jax.ShapeDtypeStruct((BATCH, ROWS, WIDTH), jnp.bfloat16)
QKV = ("linear", "linear_2", "linear_3")


def flash(q, k, v):
    """Its author estimates what it computes."""
    return flash_attention(q, k, v, causal=True, sm_scale=DEPTH**-0.5)


def splash(q, k, v):
    """Its author estimates nothing."""
    causal = splash_attention.CausalMask((ROWS, ROWS))
    mask = splash_attention.MultiHeadMask([causal] * q.shape[1])
    kernel = splash_attention.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    return jax.vmap(kernel)(q * DEPTH**-0.5, k, v)


def step_with(attention):
    def layer(x, p):
        q, k, v = ((x @ p[n]).reshape(-1, ROWS, HEADS, DEPTH).swapaxes(1, 2) for n in "qkv")
        mixed = attention(q, k, v).swapaxes(1, 2).reshape(x.shape)
        return x + jnp.tanh(mixed @ p["o"])

    def step(params, x):
        def loss(params):
            last, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)
            return (last.astype(jnp.float32) ** 2).mean()

        return jax.tree.map(lambda a, g: a - g, params, jax.grad(loss)(params))

    return step


def told(jaxpr) -> set[int]:
    """FLOPs of kernels: what their authors say, and what the trace tells."""
    said = (e.params.get("cost_estimate") for e in equations(jaxpr))
    return {s.flops for s in said if s is not None} | {f for *_, f in kernel_flops(jaxpr)}


PAIR = AbstractMesh((2,), ("tensor",), axis_types=(AxisType.Auto,))


def placed(*shapes):
    """Whole on each of two chips."""
    where = NamedSharding(PAIR, P())
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), shapes)


def mapped(attention):
    """On two chips, each with half of the heads."""
    spec = P(None, "tensor")
    return jax.shard_map(
        attention, mesh=PAIR, in_specs=spec, out_specs=spec, axis_names={"tensor"}, check_vma=False
    )


@pytest.mark.parametrize(
    ("attention", "chips"),
    [(flash, 1), (splash, 1), (mapped(flash), 2), (mapped(splash), 2)],
    ids=["flash", "splash", "flash in a shard_map", "splash in a shard_map"],
)
def test_its_forward_runs_once_where_it_is_kept(attention, chips):
    step = step_with(attention)
    args = placed(PARAMS, X) if chips == 2 else (PARAMS, X)
    (layers,) = found_layers(step, args)
    (name,) = [tag.name for tag in layers.candidates if tag.kind == "exact"]
    built = []
    target = Target.parse("v5e" if chips == 1 else "v5e:2x1")
    with backend_for(target, workers=1) as backend:
        for kept in (QKV, (*QKV, name)):
            plan = Assignment({"auto": dict.fromkeys(kept, KEEP)})
            stage, traced = trace(jaxmem.auto(step), plan, args)
            built.append(backend.compile_buffers(stage, traced).result(timeout=300))
    again, once = built
    spared = (again.matmul_flops - once.matmul_flops) / LAYERS
    assert spared in told(traced.jaxpr.jaxpr)
    assert chips * spared >= 4 * BATCH * HEADS * ROWS * ROWS * DEPTH, "two products, every row"
    rate = target.chip.flops_16bit
    assert again.xla_seconds - once.xla_seconds > 0.8 * LAYERS * spared / rate


@pytest.mark.parametrize("attention", [flash, splash])
def test_a_plan_of_kernels_inside_a_shard_map(attention):
    args = placed(PARAMS, jax.ShapeDtypeStruct((16, ROWS, WIDTH), X.dtype))
    step = jaxmem.auto(step_with(mapped(attention)))
    plan = functools.partial(jaxmem.plan, step, *args, target="v5e:2x1")
    kept = plan()
    less = plan(budget=int(0.7 * kept.baseline_bytes))
    assert kept.time_source == less.time_source == "xla"
    assert less.compiled_bytes <= 0.7 * kept.baseline_bytes


def test_a_plan_keeps_it():
    plan = jaxmem.plan(jaxmem.auto(step_with(flash)), PARAMS, X, budget="1GiB", target="v5e")
    (row,) = [r for r in plan.rows if r.tag == "flash_attention"]
    assert row.choice == KEEP

"""Run by test_division.py on eight CPU devices: how XLA divides the results of small functions over
a mesh, and the bytes of small training steps, beside what the liveness estimate says of both.

    python -m tests.shared.worker tests.programs.divided_values

Prints, as JSON: `parts`, by function, the number of devices that divide each result, by XLA and by
the estimate; `bytes`, by step, the temporary bytes that XLA assigns, the estimate, and the estimate
if every value is divided by the devices that divide the batch.
"""

import json
import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem._trace.arguments import shardings_of, shards_of
from jaxmem._trace.liveness.division import divide
from jaxmem._trace.liveness.walk import temporary_bytes
from jaxmem._trace.rewrite import flatten

ROWS = ("data", "fsdp")
B, S, D, F, H, V, LAYERS = 8, 16, 32, 64, 4, 128, 3
X, UP, DOWN = P(ROWS, None, None), P("fsdp", "tensor"), P("tensor", "fsdp")


def mlp(x, up, down):
    return jnp.tanh(x @ up), jnp.tanh(x @ up) @ down


def attention(x, q, k):
    heads = lambda y: y.reshape(B, S, H, D // H)
    scores = jnp.einsum("bshk,bthk->bhst", heads(x @ q), heads(x @ k))
    return jax.nn.softmax(scores), jnp.einsum("bhst,bthk->bshk", scores, heads(x @ k))


def lookup(table, tokens):
    return (table[tokens] * 2,)


def gradient(x, up, down):
    loss = lambda up, down: (jnp.tanh(x @ up) @ down).sum()
    return [p - g for p, g in zip((up, down), jax.grad(loss, (0, 1))(up, down))]


def loop(x, ups, downs):
    layer = lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], x.mean(-1))
    return jax.lax.scan(layer, x, (ups, downs))


def step(params, x):
    """A step of gradient descent through a loop over layers with checkpoints."""
    layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None))
    loss = lambda params: (jax.lax.scan(layer, x, params)[0] ** 2).mean()
    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, gradients)


def array(mesh, spec, *shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def parts_of(function, *args) -> list[tuple[int, int]]:
    """By result, the devices that divide it by XLA, and by the estimate."""
    jitted = jax.jit(function)
    traced = jitted.trace(*args)
    flat = flatten(traced.jaxpr)
    division = divide(flat, shardings_of(traced, args), flatten)
    compiled = jitted.lower(*args).compile()
    by_xla = jax.tree.leaves(compiled.output_shardings)
    whole = lambda v: math.prod(flat.avals[v].shape)
    each = [s.shard_shape(flat.avals[v].shape) for s, v in zip(by_xla, flat.outputs)]
    return [
        (whole(v) // math.prod(shape), division.parts(v)) for shape, v in zip(each, flat.outputs)
    ]


def bytes_of(mesh, rows: int, specs) -> dict[str, int]:
    shapes = (LAYERS, 256, 1024), (LAYERS, 1024, 256)
    params = tuple(array(mesh, spec, *shape) for spec, shape in zip(specs, shapes))
    args = params, array(mesh, X, rows, 4, 256)
    traced = jax.jit(step, donate_argnums=0).trace(*args)
    shards = shards_of(traced, args, 8)
    told = lambda **known: temporary_bytes(
        traced.jaxpr, (0, 1), on_gpu=False, shards=shards, **known
    )
    memory = traced.lower().compile().memory_analysis()
    assert memory is not None
    return {
        "compiled": memory.temp_size_in_bytes,
        "told": told(shardings=shardings_of(traced, args)),
        "scalar": told(),
    }


def main() -> None:
    kinds = (AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), (*ROWS, "tensor"), axis_types=kinds)
    x, up, down = array(mesh, X, B, S, D), array(mesh, UP, D, F), array(mesh, DOWN, F, D)
    q = array(mesh, UP, D, D)
    table, tokens = (
        array(mesh, P("tensor", "fsdp"), V, D),
        array(mesh, P(ROWS), B, S, dtype="int32"),
    )
    stacked = lambda spec, *shape: array(mesh, P(None, *spec), LAYERS, *shape)
    parts = {
        "mlp": parts_of(mlp, x, up, down),
        "attention": parts_of(attention, x, q, q),
        "lookup": parts_of(lookup, table, tokens),
        "gradient": parts_of(gradient, x, up, down),
        "loop": parts_of(loop, x, stacked(UP, D, F), stacked(DOWN, F, D)),
    }
    line = jax.make_mesh((8, 1, 1), (*ROWS, "tensor"), axis_types=kinds)
    sizes = {
        "data": bytes_of(line, 64, (P(), P())),
        "all": bytes_of(mesh, 64, (P(None, *UP), P(None, *DOWN))),
    }
    print(json.dumps({"parts": parts, "bytes": sizes}))


if __name__ == "__main__":
    main()

"""Grug's step, of the Marin project. A tuple of Equinox blocks runs in a Python loop, each under
`eqx.filter_checkpoint`. The types of arrays have shardings on an explicit mesh, and `reshard` moves
arrays. The state is donated, and one argument is static.
"""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from examples.stacks.training import RATE, Training, copied
from tests.shared.foreign import plain
from tests.shared.foreign.size import Size, normal, tokens
from tests.shared.shapes.size import SIZE

AXES = ("data", "model")
ROWS = P("data", None, None)


class Block(eqx.Module):
    norm1: jax.Array
    norm2: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    o: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    heads: int = eqx.field(static=True)

    def __call__(self, x, mask):
        split = lambda a: a.reshape(
            *a.shape[:-1], self.heads, -1, out_sharding=P("data", None, "model", None)
        )
        h = plain.rms(x, self.norm1)
        q, k, v = (
            split(jnp.einsum("bsd,de->bse", h, w, out_sharding=P("data", None, "model")))
            for w in (self.q, self.k, self.v)
        )
        wide = P("data", None, "model")
        mixed = plain.mixed(q, k, v, mask).reshape(x.shape, out_sharding=wide)
        x = x + jnp.einsum("bse,ed->bsd", mixed, self.o, out_sharding=ROWS)
        h = reshard(plain.rms(x, self.norm2), ROWS)
        gate = jnp.einsum("bsd,df->bsf", h, self.gate, out_sharding=wide)
        up = jnp.einsum("bsd,df->bsf", h, self.up, out_sharding=wide)
        return x + jnp.einsum("bsf,fd->bsd", jax.nn.silu(gate) * up, self.down, out_sharding=ROWS)


class Transformer(eqx.Module):
    embed: jax.Array
    blocks: tuple[Block, ...]
    final_norm: jax.Array
    remat: bool = eqx.field(static=True)

    def __call__(self, batch):
        x = self.embed.at[batch].get(out_sharding=ROWS)
        mask = reshard(jnp.tril(jnp.ones((batch.shape[1],) * 2, bool)), P(None, None))
        for block in self.blocks:
            x = (eqx.filter_checkpoint(block) if self.remat else block)(x, mask)
        return plain.rms(x, self.final_norm)

    def next_token_loss(self, batch):
        x = self(batch[:, :-1])
        logits = jnp.einsum("bsd,vd->bsv", x, self.embed, out_sharding=ROWS)
        labels = jax.nn.one_hot(batch[:, 1:], logits.shape[-1], dtype=logits.dtype)
        return -(jax.nn.log_softmax(logits) * labels).sum(-1).mean()


@functools.partial(jax.tree_util.register_dataclass, data_fields=["step", "params"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TrainState:
    step: jax.Array
    params: Any


def make_train_step(jit):
    def train_step(state: TrainState, batch, *, compute_watch: bool = False):
        loss, grads = jax.value_and_grad(lambda p: p.next_token_loss(batch))(state.params)
        params = jax.tree.map(lambda p, g: p - RATE * g, state.params, grads)
        metrics = {"train/loss": loss}
        watch = {"sum": sum(g.sum() for g in jax.tree.leaves(grads))} if compute_watch else None
        return dataclasses.replace(state, step=state.step + 1, params=params), metrics, watch

    return jit(train_step, donate_argnums=(0,), static_argnames=("compute_watch",))


def model_of(s: Size, remat: bool) -> Transformer:
    blocks = []
    for i in range(s.layers):
        p = plain.layer_parameters(s, 100 * i)
        fields = {f.name: p[f.name] for f in dataclasses.fields(Block) if f.name in p}
        blocks.append(Block(**fields, heads=s.heads))
    embed = normal(7, s.vocab, s.width, dtype=s.dtype)
    scale = 1 + normal(8, s.width, dtype=s.dtype)
    return Transformer(embed, tuple(blocks), scale, remat)


def placed(model: Transformer, mesh) -> Transformer:
    """Divides each weight over both axes of the mesh; a product sums over one axis."""
    sharding = lambda path, a: NamedSharding(mesh, spec_of(jax.tree_util.keystr(path), a))
    place = lambda path, a: jax.device_put(a, sharding(path, a))
    return jax.tree_util.tree_map_with_path(place, model)


def spec_of(name: str, a) -> P:
    if a.ndim == 1 or name.endswith("embed"):
        return P(*[None] * a.ndim)
    return P("model", "data") if name.endswith((".o", ".down")) else P("data", "model")


def training(jit=jax.jit, size: Size = SIZE, remat: bool = True) -> Training:
    """Grug's step. Sets a mesh of one device, which remains set."""
    mesh = jax.make_mesh((1, 1), AXES, axis_types=(AxisType.Explicit,) * 2)
    jax.set_mesh(mesh)
    model = placed(model_of(size, remat), mesh)
    batch = jax.device_put(tokens(size), NamedSharding(mesh, P("data", None)))
    state = TrainState(jnp.zeros((), jnp.int32), model)
    arguments = lambda: ((copied(state), batch), {"compute_watch": True})
    found = lambda args, kwargs, result: (result[1]["train/loss"], result[0].params)
    return Training(make_train_step(jit), arguments, found, model)

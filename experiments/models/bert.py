"""BERT in Flax NNX: layer norm after each residual sum, attention to all positions, prediction of
masked tokens.

As in Devlin et al. (2018) without next-sentence prediction, which RoBERTa and AdamA's runs omit
too. 15 % of the positions are chosen: 80 % of them become [MASK], 10 % become another token, and
10 % do not change. Text is read as bytes, so [MASK] is token 256.

Shapes: B batch, S sequence, P predictions, D width, H heads, K = D / H, F = 4 D, V vocabulary, L
layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxmem
from experiments.config.models import Model
from experiments.config.text import Config
from experiments.data.tokens import MASK
from experiments.models.blocks import (
    INIT,
    Layer,
    Norm,
    attention,
    dropout,
    layers,
    linear,
    parameter_dtype,
    pure,
)
from experiments.models.split import Split

CHOSEN = 0.15


class Block(nnx.Module):
    """One layer. Dropout masks are functions of the key, so a recomputed block has equal values."""

    def __init__(self, model: Model, rngs: nnx.Rngs):
        self.model = model
        self.qkv = linear(model, model.width, 3 * model.width, rngs)
        self.proj = linear(model, model.width, model.width, rngs)
        self.ln1, self.ln2 = Norm(model, rngs), Norm(model, rngs)
        self.up = linear(model, model.width, 4 * model.width, rngs)
        self.down = linear(model, 4 * model.width, model.width, rngs)

    def __call__(self, x_BSD, key=None, seen_BS=None):
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        rate, tag = self.model.dropout, jaxmem.tag
        x_BSD = tag(x_BSD, "resid_in", kind="norm")
        a_BSD = tag(
            attention(self.model, self.qkv(x_BSD), keys[0], False, seen_BS), "attn", kind="linear"
        )
        sum_BSD = tag(
            x_BSD + dropout(self.proj(a_BSD), rate, keys[1], "attn_out_mask"),
            "mid",
            kind="residual",
        )
        n_BSD = tag(self.ln1(sum_BSD), "ln1", kind="norm")
        u_BSF = tag(self.up(n_BSD), "up", kind="linear")
        g_BSF = tag(jax.nn.gelu(u_BSF, approximate=False), "gelu", kind="gelu")
        sum_BSD = tag(
            n_BSD + dropout(self.down(g_BSF), rate, keys[2], "mlp_out_mask"), "out", kind="residual"
        )
        return self.ln2(sum_BSD)


def parts(config: Config, key) -> tuple[dict, Layer]:
    """Returns a BERT's parameters outside the layers, a nested dict of arrays, and the function of
    a layer's parameters. The head uses `embedding` too.
    """
    model, rngs = config.model, nnx.Rngs(params=key)
    wide, normal = parameter_dtype(model), nnx.initializers.normal(INIT)
    make = lambda rows: normal(rngs.params(), (rows, model.width), wide)
    rows = {"embedding": model.vocab, "positions": config.train.sequence, "segments": 2}
    tables = {name: make(count) for name, count in rows.items()}
    layer = layers(model, Block, rngs)
    norms = {name: pure(Norm(model, rngs)) for name in ("first", "last")}
    head = {
        "transform": pure(linear(model, model.width, model.width, rngs)),
        "bias": jnp.zeros(model.vocab, wide),
    }
    return tables | norms | head, layer


def split(config: Config) -> Split:
    """Returns the BERT of masked language modelling. A batch is a dict from `batch`. Its
    `segments` (B, S) are optional, and 0 by default.
    """
    model, dtype, wide = config.model, jnp.dtype(config.model.dtype), parameter_dtype(config.model)
    graph = lambda make: nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    block, norm = graph(lambda rngs: Block(model, rngs)), graph(lambda rngs: Norm(model, rngs))
    dense = graph(lambda rngs: linear(model, model.width, model.width, rngs))
    call = lambda graph, parameters, x: nnx.merge(graph, nnx.State(parameters))(x)

    def embed(outer, batch, key=None):
        tokens_BS = batch["tokens"]
        segments = outer["segments"][batch.get("segments", 0)]
        rows = (outer["positions"][: tokens_BS.shape[1]] + segments).astype(dtype)
        x_BSD = call(norm, outer["first"], outer["embedding"].astype(dtype)[tokens_BS] + rows)
        return dropout(x_BSD, model.dropout, key, "embedding_mask")

    def layer(parameters, x_BSD, seen_BS=None, key=None):
        return nnx.merge(block, nnx.State(parameters))(x_BSD, key, seen_BS)

    def head(outer, x_BSD, batch):
        chosen_BPD = jnp.take_along_axis(x_BSD, batch["positions"][..., None], 1)
        hidden_BPD = jax.nn.gelu(call(dense, outer["transform"], chosen_BPD), approximate=False)
        hidden_BPD = call(norm, outer["last"], hidden_BPD)
        logits_BPV = (
            jnp.einsum("bpd,vd->bpv", hidden_BPD, outer["embedding"].astype(dtype)).astype(wide)
            + outer["bias"]
        )
        logs_BPV = jax.nn.log_softmax(logits_BPV)
        return -jnp.take_along_axis(logs_BPV, batch["targets"][..., None], -1).mean()

    return Split(embed, layer, head)


def batch(config: Config, rows: np.ndarray, seed: int, step: int) -> dict[str, np.ndarray]:
    """Returns tokens (B, S), and the positions and targets (B, P) of the tokens to predict, all
    int32. The last token of each row of text (B, S + 1) is not used.
    """
    rng = np.random.default_rng((seed, step, 1))
    tokens_BS = rows[:, :-1].astype(np.int32)
    B, S = tokens_BS.shape
    P = max(1, round(CHOSEN * S))
    positions_BP = np.sort(
        rng.permuted(np.tile(np.arange(S, dtype=np.int32), (B, 1)), axis=1)[:, :P], axis=1
    )
    targets_BP = np.take_along_axis(tokens_BS, positions_BP, 1)
    fate_BP = rng.random((B, P))
    other_BP = rng.integers(0, MASK, (B, P), dtype=np.int32)
    shown_BP = np.where(
        fate_BP < 0.8, np.int32(MASK), np.where(fate_BP < 0.9, other_BP, targets_BP)
    )
    np.put_along_axis(tokens_BS, positions_BP, shown_BP, 1)
    return {"tokens": tokens_BS, "positions": positions_BP, "targets": targets_BP}

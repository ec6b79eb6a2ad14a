"""GPT-2 in Flax NNX, with a tag on every tensor of Adacc's table; with `activation = "relu"`, OPT.
With several `experts`, the MLPs are mixtures of experts.

The model uses NNX; the alternative is linen. Flax documents and develops NNX in 2026, and NNX
modules are plain objects that contain their arrays, so a layer's parameters can be created alone,
stacked and scanned. Tags work in linen too: `docs/adopting.md` has tagged layers in linen's
`nn.scan(nn.remat(...))`, and in `nnx.scan`. The layer loop (`loops.py`) runs over stacked
parameters; the alternative is `nnx.scan`, which also returns every parameter from the loop. That
costs nothing under jit, but clutters a profile. The model is three functions (`split.py`), since a
step that releases gradients runs the layers and the rest of the model separately.

Shapes: B batch, S sequence, D width, H heads, K = D / H, F = 4 D, V vocabulary, L layers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxmem
from experiments.config.models import Model
from experiments.config.text import Config
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
    queries_keys_values,
)
from experiments.models.experts import Experts
from experiments.models.loss import cross_entropy, logits
from experiments.models.sharding import constrain, like, looked_up, of_rows
from experiments.models.split import Split

ACTIVATIONS = {"gelu": functools.partial(jax.nn.gelu, approximate=True), "relu": jax.nn.relu}


class Block(nnx.Module):
    """One layer. Dropout masks are functions of the key, so a recomputed block has equal values."""

    def __init__(self, model: Model, rngs: nnx.Rngs):
        self.model = model
        width, depth_scale = (
            model.width,
            (2 * model.layers) ** -0.5,
        )  # GPT-2 scales down the projections into the residual stream
        self.ln1, self.ln2 = Norm(model, rngs), Norm(model, rngs)
        self.qkv = linear(model, width, 3 * width, rngs)
        self.proj = linear(model, width, width, rngs, depth_scale)
        if model.experts > 1:
            wide = parameter_dtype(model)
            make = lambda shape, scale: INIT * scale * jax.random.normal(rngs.params(), shape, wide)
            self.experts = Experts(model, make, ACTIVATIONS[model.activation], depth_scale)
            return
        self.up = linear(model, width, 4 * width, rngs)
        self.down = linear(model, 4 * width, width, rngs, depth_scale)

    def __call__(self, x_BSD, key=None):
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        rate, tag = self.model.dropout, jaxmem.tag
        x_BSD = tag(x_BSD, "resid_in", kind="residual")
        n_BSD = tag(self.ln1(x_BSD), "ln1", kind="norm")
        qkv = queries_keys_values(self.qkv, n_BSD)
        a_BSD = tag(attention(self.model, qkv, keys[0], causal=True), "attn", kind="linear")
        x_BSD = tag(
            x_BSD + dropout(self.proj(a_BSD, like(x_BSD)), rate, keys[1], "attn_out_mask"),
            "mid",
            kind="residual",
        )
        n_BSD = tag(self.ln2(x_BSD), "ln2", kind="norm")
        out_BSD = self.experts(n_BSD) if self.model.experts > 1 else self.mlp(n_BSD, like(x_BSD))
        return x_BSD + dropout(out_BSD, rate, keys[2], "mlp_out_mask")

    def mlp(self, n_BSD, out_sharding):
        u_BSF = jaxmem.tag(constrain(self.up(of_rows(n_BSD)), "features_BSF"), "up", kind="linear")
        g_BSF = ACTIVATIONS[self.model.activation](u_BSF)
        return self.down(jaxmem.tag(g_BSF, self.model.activation, kind="gelu"), out_sharding)


def parts(config: Config, key) -> tuple[dict, Layer]:
    """Returns a GPT's parameters outside the layers, a nested dict of arrays, and the function of
    a layer's parameters. `embedding` is also the head; `positions` has `train.sequence` rows.
    """
    model, rngs = config.model, nnx.Rngs(params=key)
    wide, normal = parameter_dtype(model), nnx.initializers.normal(INIT)
    make = lambda *shape: normal(rngs.params(), shape, wide)
    embedding = make(model.vocab, model.width)
    positions = make(config.train.sequence, model.width)
    layer = layers(model, Block, rngs)
    return {"embedding": embedding, "positions": positions, "final": pure(Norm(model, rngs))}, layer


def split(config: Config) -> Split:
    """Returns the GPT of next-token prediction. A batch is tokens, int32 (B, S + 1)."""
    model, dtype = config.model, jnp.dtype(config.model.dtype)
    block = nnx.graphdef(nnx.eval_shape(lambda: Block(model, nnx.Rngs(0))))
    final = nnx.graphdef(nnx.eval_shape(lambda: Norm(model, nnx.Rngs(0))))

    def embed(outer, tokens, key=None):
        positions_SD = outer["positions"][: tokens.shape[1] - 1]
        found_BSD = looked_up(outer["embedding"].astype(dtype), tokens[:, :-1])
        return found_BSD + positions_SD.astype(dtype)

    def layer(parameters, x_BSD, key=None):
        return nnx.merge(block, nnx.State(parameters))(x_BSD, key)

    def hidden(outer, x_BSD):
        return nnx.merge(final, nnx.State(outer["final"]))(x_BSD)

    def head(outer, x_BSD, tokens):
        chunk = config.train.loss_chunk
        return cross_entropy(hidden(outer, x_BSD), outer["embedding"], tokens[:, 1:], chunk)

    def scores(outer, x_BSD):
        return logits(hidden(outer, x_BSD), outer["embedding"])

    return Split(embed, layer, head, scores)


def batch(config: Config, rows: np.ndarray, seed: int, step: int) -> np.ndarray:
    """Returns rows of text, int32 (B, S + 1), unchanged."""
    return rows

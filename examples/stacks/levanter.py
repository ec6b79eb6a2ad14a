"""Levanter's Llama, whose layers haliax scans, under a byte budget.

python -m examples.stacks.levanter [--share 0.6] [--out row.json]
"""

import equinox as eqx
import haliax as hax
import jax
from levanter.layers.attention import AttentionBackend
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from levanter.models.lm_model import LmExample

import jaxmem
from examples.stacks.training import RATE, Training, copied, main

BATCH, VOCAB = hax.Axis("batch", 4), hax.Axis("vocab", 256)


def config_of(policy) -> LlamaConfig:
    return LlamaConfig(
        max_seq_len=128, hidden_dim=64, intermediate_dim=256, num_layers=4, num_heads=4,
        num_kv_heads=2, attn_backend=AttentionBackend.VANILLA, gradient_checkpointing=policy,
    )  # fmt: skip


def own(train_step):
    return eqx.filter_jit(train_step, donate="all")


def planned(train_step, **plan):
    return jaxmem.jit(train_step, donate_argnums=0, **plan)


def training(policy=True, jit=own) -> Training:
    config = config_of(policy)
    model = LlamaLMHeadModel.init(VOCAB, config, key=jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(2), 999))
    moved = lambda p: p + 0.05 * jax.random.normal(next(keys), p.shape, p.dtype)
    model = jax.tree.map(lambda p: moved(p) if eqx.is_inexact_array(p) else p, model)
    Pos = config.max_Pos
    tokens = hax.random.randint(jax.random.key(1), (BATCH, Pos), 0, VOCAB.size)

    def train_step(model, tokens):
        def loss_fn(model):
            example = hax.vmap(LmExample.causal, BATCH)(tokens)
            return model.compute_next_token_loss(example).scalar()

        loss, gradients = eqx.filter_value_and_grad(loss_fn)(model)
        updates = jax.tree.map(lambda g: -RATE * g, gradients)
        return eqx.apply_updates(model, updates), loss

    arrays = lambda tree: eqx.filter(tree, eqx.is_inexact_array)
    return Training(
        jit(train_step),
        lambda: (copied((model, tokens)), {}),
        lambda args, kwargs, result: (result[1], arrays(result[0])),
        arrays(model),
    )


POLICIES = {"False": False, "True": True, "save_all": "save_all", "nested": "nested"}

if __name__ == "__main__":
    main("marin-levanter", training, planned, POLICIES)

"""Hugging Face's GPT-2, in Flax, under a byte budget.

python -m examples.stacks.transformers [--share 0.6] [--out row.json]
"""

import jax
import jax.numpy as jnp
from transformers import FlaxGPT2LMHeadModel, GPT2Config

import jaxmem
from examples.stacks.training import RATE, Training, copied, main

TOKENS = jax.random.randint(jax.random.key(1), (4, 129), 0, 256)


def own(train_step):
    return jax.jit(train_step, donate_argnums=0)


def planned(train_step, **plan):
    return jaxmem.jit(train_step, donate_argnums=0, **plan)


def training(policy=None, jit=own) -> Training:
    config = GPT2Config(vocab_size=256, n_layer=4, n_embd=64, n_head=4, n_positions=128)
    model = FlaxGPT2LMHeadModel(config, input_shape=(1, 8))
    keys = iter(jax.random.split(jax.random.key(2), 999))
    moved = lambda p: p + 0.05 * jax.random.normal(next(keys), p.shape, p.dtype)
    params = jax.tree.map(moved, model.params)

    def train_step(params, tokens, key):
        def loss_fn(params):
            logits = model(tokens[:, :-1], params=params, dropout_rng=key, train=True).logits
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
            return -picked.mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradients), loss

    return Training(
        jit(train_step),
        lambda: ((copied(params), TOKENS, jax.random.key(3)), {}),
        lambda args, kwargs, result: (result[1], result[0]),
        params,
    )


if __name__ == "__main__":
    main("transformers", training, planned, {"none": None})

"""A vision transformer of equimo, in Equinox, under a byte budget.

python -m examples.stacks.equimo [--share 0.6] [--out row.json]
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from equimo.vision.models.vit import VisionTransformer

import jaxmem
from examples.stacks.training import RATE, Training, copied, main

IMAGES = jax.random.normal(jax.random.key(1), (8, 3, 32, 32))
LABELS = jnp.arange(8) % 10


def own(train_step):
    return eqx.filter_jit(train_step, donate="all")


def planned(train_step, **plan):
    return jaxmem.jit(train_step, donate_argnums=0, **plan)


def training(policy=None, jit=own) -> Training:
    model = VisionTransformer(
        img_size=32, in_channels=3, dim=64, patch_size=4, num_heads=4, depths=[6], reg_tokens=0,
        num_classes=10, key=jax.random.key(0),
    )  # fmt: skip
    keys = iter(jax.random.split(jax.random.key(2), 999))
    moved = lambda p: p + 0.05 * jax.random.normal(next(keys), p.shape, p.dtype)
    model = jax.tree.map(lambda p: moved(p) if eqx.is_inexact_array(p) else p, model)

    def train_step(model, images, labels, key):
        def loss_fn(model):
            keys = jax.random.split(key, len(images))
            logits = jax.vmap(model)(images, keys)
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

        loss, gradients = eqx.filter_value_and_grad(loss_fn)(model)
        updates = jax.tree.map(lambda g: -RATE * g, gradients)
        return eqx.apply_updates(model, updates), loss

    arrays = lambda tree: eqx.filter(tree, eqx.is_inexact_array)
    return Training(
        jit(train_step),
        lambda: (copied((model, IMAGES, LABELS, jax.random.key(3))), {}),
        lambda args, kwargs, result: (result[1], arrays(result[0])),
        arrays(model),
    )


if __name__ == "__main__":
    main("equimo", training, planned, {"none": None})

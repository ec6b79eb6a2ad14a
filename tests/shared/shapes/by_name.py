"""Steps that look policies up by name in `jax.checkpoint_policies`. big_vision's step has a scan
over Linen layers, whose checkpoint has a static argument. simply's step has a scan of `jax.remat`,
which prevents common subexpression elimination.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from examples.stacks.training import RATE, Training, copied
from tests.shared.foreign import plain
from tests.shared.foreign.size import Size, cross_entropy, normal, perturbed, tokens
from tests.shared.shapes.size import SIZE


class Encoder1DBlock(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x, deterministic=True):
        assert isinstance(deterministic, bool)  # static
        s, out = self.size, {}
        h = nn.LayerNorm()(x)
        h = out["sa"] = nn.MultiHeadDotProductAttention(s.heads, use_bias=False)(h, h)
        x = x + nn.Dropout(0.1)(h, deterministic)
        h = nn.Dense(s.width)(nn.gelu(nn.Dense(2 * s.width)(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.1)(h, deterministic), out


class ViT(nn.Module):
    size: Size
    policy: str

    @nn.compact
    def __call__(self, image, *, train=False):
        s = self.size
        x = nn.Conv(s.width, (4, 4), strides=(4, 4), padding="VALID", name="embedding")(image)
        x = x.reshape(len(x), -1, s.width)
        x = x + self.param("pos_embedding", nn.initializers.normal(0.1), (1, *x.shape[1:]))
        block = Encoder1DBlock
        if self.policy != "none":
            policy = getattr(jax.checkpoint_policies, self.policy, None)
            block = nn.remat(block, prevent_cse=False, static_argnums=(2,), policy=policy)
        rngs = {"params": True, "dropout": True}
        how = {"variable_axes": {"params": 0}, "split_rngs": rngs, "in_axes": nn.broadcast}
        layers = nn.scan(block, **how, length=s.layers)
        x, out = layers(s, name="encoderblock")(x, not train)
        return nn.Dense(10, name="head")(nn.LayerNorm()(x).mean(1)), out


def big_vision(jit=jax.jit, size: Size = SIZE, policy: str = "nothing_saveable") -> Training:
    """big_vision's step. `update_fn` donates the state, and averages no gradients."""
    model, tx = ViT(size, policy), optax.sgd(RATE)
    side = 4 * int(size.sequence**0.5)
    images = normal(0, size.batch, side, side, 3, scale=1.0, dtype=size.dtype)
    params = perturbed(jax.jit(model.init)(jax.random.key(0), images)["params"])
    batch = {"image": images, "labels": jnp.arange(size.batch) % 10}

    def update_fn(train_state, rng, batch):
        rng, rng_model = jax.random.split(rng)

        def loss_fn(params):
            rngs = {"dropout": rng_model}
            logits, _ = model.apply({"params": params}, batch["image"], train=True, rngs=rngs)
            return cross_entropy(logits, batch["labels"])

        params, opt = train_state["params"], train_state["opt"]
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt": opt}, {"training_loss": loss}

    step = jit(update_fn, donate_argnums=(0,))
    state = {"params": params, "opt": tx.init(params)}
    found = lambda args, kwargs, result: (result[1]["training_loss"], result[0]["params"])
    return Training(step, lambda: ((copied(state), jax.random.key(1), batch), {}), found, params)


def simply(jit=jax.jit, size: Size = SIZE, policy: str = "nothing_saveable") -> Training:
    """simply's step. The body of the layers is under `jax.remat` with its default
    `prevent_cse=True`. The step has static arguments, by name.
    """
    params, data = plain.stacked_parameters(size), tokens(size)
    layer = functools.partial(plain.gemma_layer, heads=size.heads)

    def apply(params, batch):
        def body(x, p):
            return layer(x, p), None

        if policy != "none":
            body = jax.remat(body, policy=getattr(jax.checkpoint_policies, policy, None))
        x, _ = jax.lax.scan(body, params["embedding"][batch[:, :-1]], params["layers"])
        return x @ params["embedding"].T

    def train_one_step(state, batch, *, clip: float, add_log_info: bool = False):
        def loss_fn(params):
            loss = cross_entropy(apply(params, batch), batch[:, 1:])
            return loss, {"tokens": batch.size}

        (loss, extra), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        scale = jnp.minimum(1, clip / optax.tree.norm(grads)) if clip > 0 else 1.0
        moved = jax.tree.map(lambda p, g: p - RATE * scale * g, state["params"], grads)
        state = {"params": moved, "steps": state["steps"] + 1}
        return loss, state, extra if add_log_info else {}

    step = jit(train_one_step, donate_argnames="state", static_argnames=("clip", "add_log_info"))
    state = {"params": params, "steps": jnp.zeros((), jnp.int32)}
    options = {"clip": -1.0, "add_log_info": True}
    found = lambda args, kwargs, result: (result[0], result[1]["params"])
    return Training(step, lambda: ((copied(state), data), options), found, params)

"""The GPT's block in Flax's other spellings: linen's `nn.scan(nn.remat(...))` and
`nnx.scan(nnx.remat(...))`.

Both take the NNX model's own parameters, give its hidden states, and obey a plan's actions.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from experiments.config.models import Model
from experiments.config.text import Config, Optimizer, Train
from experiments.models import gpt
from experiments.models import registry as models
from jaxmem.plans import Assignment, Choice
from tests.experiments.states import parameters
from tests.shared.marks import slow

pytestmark = [pytest.mark.jax_defaults, pytest.mark.core]

MODEL = Model(layers=2, width=32, heads=2)
TRAIN, OPTIMIZER = Train(steps=1, batch=2, sequence=16, loss_chunk=4), Optimizer(learning_rate=1e-3)
CONFIG = Config(model=MODEL, train=TRAIN, optimizer=OPTIMIZER)
INT4 = "grouped_symmetric(group=64,scale=bfloat16)"
TAGS = ("resid_in", "ln1", "qkv", "probs", "attn", "mid", "ln2", "up", "gelu")


class LinenBlock(nn.Module):
    """`experiments.models.gpt.Block` without dropout, in linen."""

    model: Model

    @nn.compact
    def __call__(self, x_BSD, _):
        tag, D = jaxmem.tag, self.model.width
        norm = lambda name: nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name=name)
        x_BSD = tag(x_BSD, "resid_in", kind="residual")
        n_BSD = tag(norm("ln1")(x_BSD), "ln1", kind="norm")
        qkv = tag(nn.Dense(3 * D, name="qkv")(n_BSD), "qkv", kind="qkv")
        q, k, v = jnp.moveaxis(qkv.reshape(*x_BSD.shape[:2], 3, self.model.heads, -1), 2, 0)
        scores = jnp.einsum("bshk,bthk->bhst", q, k) * (D // self.model.heads) ** -0.5
        scores = jnp.where(
            jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, jnp.finfo(scores.dtype).min
        )
        a_BSD = jnp.einsum("bhst,bthk->bshk", jaxmem.ops.softmax(scores, "probs"), v).reshape(
            x_BSD.shape
        )
        x_BSD = tag(
            x_BSD + nn.Dense(D, name="proj")(tag(a_BSD, "attn", kind="linear")),
            "mid",
            kind="residual",
        )
        n_BSD = tag(norm("ln2")(x_BSD), "ln2", kind="norm")
        u_BSF = tag(nn.Dense(4 * D, name="up")(n_BSD), "up", kind="linear")
        return x_BSD + nn.Dense(D, name="down")(tag(nn.gelu(u_BSF), "gelu", kind="gelu")), None


class LinenLayers(nn.Module):
    model: Model
    policy: object

    @nn.compact
    def __call__(self, x_BSD):
        block = nn.remat(LinenBlock, policy=self.policy, prevent_cse=False)
        axes, rngs = {"params": 0}, {"params": True}
        stack = nn.scan(block, variable_axes=axes, split_rngs=rngs, length=self.model.layers)
        return stack(self.model, name="blocks")(x_BSD, None)[0]


def linen(params, x_BSD, policy):
    return LinenLayers(MODEL, policy).apply({"params": {"blocks": params}}, x_BSD)


def block(params) -> nnx.Module:
    return nnx.merge(
        nnx.graphdef(nnx.eval_shape(lambda: gpt.Block(MODEL, nnx.Rngs(0)))), nnx.State(params)
    )


def nnx_scan(params, x_BSD, policy):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat(policy=policy, prevent_cse=False)
    def layers(x_BSD, one):
        return one(x_BSD)

    return layers(x_BSD, block(params))  # stacked parameters: a block with one more axis


def main_gpt(params, x_BSD, policy):
    """The same layers as `experiments.models.gpt` runs them, without a checkpoint."""
    for i in range(MODEL.layers):
        x_BSD = block(jax.tree.map(lambda a, i=i: a[i], params))(x_BSD)
    return x_BSD


@functools.cache
def inputs():
    params = parameters(functools.partial(models.create, CONFIG), shaken=0.1)["blocks"]
    return params, np.random.default_rng(2).normal(size=(2, 16, MODEL.width)).astype(np.float32)


@functools.cache
def main_loss_and_gradient():
    return jax.jit(jax.value_and_grad(loss(main_gpt, None)))(*inputs())


def loss(spelling, policy):
    return lambda params, x_BSD: (spelling(params, x_BSD, policy) ** 2).mean()


def policy(action):
    choice = Choice(action, INT4 if action == "compress" else None)
    return jaxmem.remat_policy(Assignment({"block": dict.fromkeys(TAGS, choice)}))


@pytest.mark.parametrize("spelling", [linen, slow(nnx_scan)])
def test_the_spellings_are_one_model_under_every_plan(spelling):
    params, x = inputs()
    value, grads = main_loss_and_gradient()
    flat = lambda tree: np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)])
    keep = jax.jit(jax.value_and_grad(loss(spelling, policy("keep"))))(params, x)
    np.testing.assert_allclose(keep[0], value, rtol=1e-5)
    np.testing.assert_allclose(flat(keep[1]), flat(grads), rtol=1e-3, atol=1e-6)
    recompute = jax.jit(jax.value_and_grad(loss(spelling, policy("recompute"))))(params, x)
    np.testing.assert_allclose(recompute[0], keep[0], rtol=1e-6)
    np.testing.assert_allclose(flat(recompute[1]), flat(keep[1]), rtol=1e-4, atol=1e-7)
    compress = jax.jit(jax.value_and_grad(loss(spelling, policy("compress"))))(params, x)
    np.testing.assert_allclose(compress[0], keep[0], rtol=1e-6)
    a, b = flat(compress[1]), flat(keep[1])
    cosine = float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert 0.9 < cosine < 0.99999


@pytest.mark.parametrize("spelling", [linen, nnx_scan])
def test_a_recomputed_block_repeats_its_products_and_a_kept_one_does_not(spelling):
    products = lambda action: str(
        jax.make_jaxpr(jax.grad(loss(spelling, policy(action))))(*inputs())
    ).count("dot_general")
    assert products("keep") == 6 + 12  # forward, and two for each in the backward
    assert products("recompute") == 6 + 12 + 5  # the last product's result is not needed

"""Steps of trainers. Tunix's step changes an NNX model, an optimizer and an accumulator of
gradients, and updates the model in a conditional. Kauldron's step is a jitted method with a static
object and keyword arguments.
"""

import dataclasses
import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState as LinenState

from examples.stacks.training import RATE, Training, copied
from tests.shared.foreign import plain
from tests.shared.foreign.flax_models import LinenLayer
from tests.shared.foreign.size import Size, cross_entropy, perturbed, tokens
from tests.shared.shapes.size import SIZE


class Low(nnx.Module):
    """A product with weights, plus a product with two low-rank matrices."""

    def __init__(self, inputs: int, outputs: int, rank: int, rngs: nnx.Rngs):
        self.w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (inputs, outputs)))
        if rank:
            make = nnx.initializers.lecun_normal()
            self.a = nnx.LoRAParam(make(rngs.params(), (inputs, rank)))
            self.b = nnx.LoRAParam(make(rngs.params(), (rank, outputs)))
        self.rank = rank

    def __call__(self, x):
        y = x @ self.w
        return y + (x @ self.a) @ self.b if self.rank else y


class DecoderLayer(nnx.Module):
    def __init__(self, s: Size, rank: int, remat: bool, rngs: nnx.Rngs):
        make = functools.partial(Low, rank=rank, rngs=rngs)
        self.norm1 = nnx.RMSNorm(s.width, rngs=rngs)
        self.q, self.k, self.v, self.o = (make(s.width, s.width) for _ in range(4))
        self.norm2 = nnx.RMSNorm(s.width, rngs=rngs)
        self.gate, self.up = (make(s.width, 2 * s.width) for _ in range(2))
        self.down = make(2 * s.width, s.width)
        self.heads, self.remat = s.heads, remat

    def block(self, x, mask):
        h = self.norm1(x)
        split = lambda a: a.reshape(*a.shape[:-1], self.heads, -1)
        q, k, v = split(self.q(h)), split(self.k(h)), split(self.v(h))
        x = x + self.o(plain.mixed(q, k, v, mask).reshape(x.shape))
        h = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))

    def __call__(self, x, mask):
        if not self.remat:
            return self.block(x, mask)
        graph, state = nnx.split(self)

        @jax.checkpoint
        def checkpointed(state, x, mask):
            layer = nnx.merge(graph, state)
            out = layer.block(x, mask)
            return out, nnx.state(layer)

        out, state = checkpointed(state, x, mask)
        nnx.update(self, state)
        return out


class Decoder(nnx.Module):
    def __init__(self, s: Size, rank: int, remat: bool, rngs: nnx.Rngs):
        self.embedder = nnx.Embed(s.vocab, s.width, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(s, rank, remat, rngs) for _ in range(s.layers)])
        self.norm = nnx.RMSNorm(s.width, rngs=rngs)

    def __call__(self, input_tokens, attention_mask):
        x = self.embedder(input_tokens)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.embedder.attend(self.norm(x))


class Accumulator(nnx.Module):
    """Sums gradients in place."""

    def __init__(self, params):
        self.sum = nnx.data(jax.tree.map(lambda p: nnx.Variable(jnp.zeros_like(p)), params))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def add(self, grads):
        for variable, g in zip(*map(self._leaves, (self.sum, grads)), strict=True):
            variable[...] += g[...] if isinstance(g, nnx.Variable) else g
        self.count[...] += 1

    def mean(self, like):
        values = [v[...] / self.count[...] for v in self._leaves(self.sum)]
        structure = jax.tree.structure(like)
        return jax.tree.unflatten(structure, values)

    def reset(self):
        for variable in self._leaves(self.sum):
            variable[...] = jnp.zeros_like(variable[...])
        self.count[...] = jnp.zeros_like(self.count[...])

    @staticmethod
    def _leaves(tree):
        return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def tunix(jit=nnx.jit, size: Size = SIZE, remat: bool = True, rank: int = 2) -> Training:
    """Tunix's step. It donates the optimizer and the accumulator by name, but not the model."""
    trained = nnx.LoRAParam if rank else nnx.Param
    made = Decoder(size, rank, remat, nnx.Rngs(0))
    graph, state = nnx.split(made)
    state = perturbed(state)
    data = tokens(size)
    mask = jnp.tril(jnp.ones((size.sequence,) * 2, bool))
    inputs = {"input_tokens": data[:, :-1], "labels": data[:, 1:], "attention_mask": mask}

    def loss_fn(model, input_tokens, labels, attention_mask):
        return cross_entropy(model(input_tokens, attention_mask), labels), {"tokens": labels.size}

    def train_step(model, optimizer, grad_accumulator, inputs, is_update_step):
        differentiated = nnx.DiffState(0, trained) if rank else 0
        grad_fn = nnx.value_and_grad(loss_fn, argnums=differentiated, has_aux=True)
        (loss, aux), grads = grad_fn(model, **inputs)
        grad_accumulator.add(grads)

        def apply(model, optimizer, grad_accumulator, grads):
            optimizer.update(model, grad_accumulator.mean(grads))
            grad_accumulator.reset()
            return optax.tree.norm(grads)

        def skip(model, optimizer, grad_accumulator, grads):
            return optax.tree.norm(grads)

        norm = nnx.cond(is_update_step, apply, skip, model, optimizer, grad_accumulator, grads)
        return loss, aux, norm

    def arguments():
        model = nnx.merge(graph, copied(state))
        optimizer = nnx.Optimizer(model, optax.sgd(RATE), wrt=trained)
        accumulator = Accumulator(nnx.state(model, trained))
        return (model, optimizer, accumulator, inputs, jnp.array(True)), {}

    step = jit(train_step, donate_argnames=("optimizer", "grad_accumulator"))
    found = lambda args, kwargs, result: (result[0], nnx.state(args[0], trained))
    return Training(step, arguments, found, nnx.filter_state(state, trained))


class Transformer(nn.Module):
    """A Python loop over layers without a checkpoint, as in gemma."""

    size: Size

    @nn.compact
    def __call__(self, batch):
        s = self.size
        embed = nn.Embed(s.vocab, s.width)
        x = embed(batch)
        for i in range(s.layers):
            x, _ = LinenLayer(s, train=False, name=f"layer_{i}")(x)
        return embed.attend(nn.LayerNorm()(x))


def transformer(size: Size):
    """A model, its tokens and its parameters."""
    model, data = Transformer(size), tokens(size)
    params = jax.jit(model.init)(jax.random.key(0), data[:, :-1])["params"]
    return model, data, perturbed(params)


@flax.struct.dataclass
class TrainState:
    step: Any
    params: Any
    opt_state: Any


@flax.struct.dataclass
class Context:
    """The values that a loss reads and writes: the differentiated function's first argument."""

    step: Any
    params: Any
    batch: Any
    preds: Any = None
    interms: Any = None
    loss_total: Any = None


def forward_with_loss(context: Context, *, model: nn.Module, is_training: bool):
    tokens, how = context.batch["tokens"], {"mutable": True, "capture_intermediates": True}
    preds, collections = model.apply({"params": context.params}, tokens[:, :-1], **how)
    loss = cross_entropy(preds, tokens[:, 1:])
    interms = collections.pop("intermediates")
    return loss, context.replace(preds=preds, interms=interms, loss_total=loss)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    model: nn.Module
    optimizer: optax.GradientTransformation

    def _step(self, state: TrainState, batch):
        grad_fn = jax.grad(forward_with_loss, argnums=0, has_aux=True, allow_int=True)
        context = Context(step=state.step, params=state.params, batch=batch)
        grad_fn = jax.named_call(grad_fn, name="grad_fn")
        gradients, context = grad_fn(context, model=self.model, is_training=True)
        updates, opt_state = self.optimizer.update(gradients.params, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), context


def kauldron(jit=jax.jit, size: Size = SIZE) -> Training:
    how = {"static_argnames": ("self", "return_losses"), "donate_argnames": ("state",)}

    class Trainer(TrainStep):
        @functools.partial(jit, **how)
        def step(self, state, batch, *, return_losses: bool = False):
            state, context = self._step(state, batch)
            return state, {"loss": context.loss_total} if return_losses else {}

    model, data, params = transformer(size)
    trainer = Trainer(model, optax.sgd(RATE))
    state = TrainState(jnp.zeros((), jnp.int32), params, trainer.optimizer.init(params))
    options = lambda: {"state": copied(state), "batch": {"tokens": data}, "return_losses": True}
    found = lambda args, kwargs, result: (result[1]["loss"], result[0].params)
    return Training(Trainer.step, lambda: ((trainer,), options()), found, params)


def linen(jit=jax.jit, size: Size = SIZE) -> Training:
    """The step of Flax's guides: a `TrainState` with the model's and the optimizer's functions."""
    model, data, params = transformer(size)
    fixed = {"apply_fn": model.apply, "tx": optax.sgd(RATE)}
    make = lambda: LinenState.create(params=copied(params), **fixed)

    def train_step(state, batch):
        def loss_fn(params):
            return cross_entropy(state.apply_fn({"params": params}, batch[:, :-1]), batch[:, 1:])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    found = lambda args, kwargs, result: (result[1], result[0].params)
    return Training(jit(train_step, donate_argnums=0), lambda: ((make(), data), {}), found, params)

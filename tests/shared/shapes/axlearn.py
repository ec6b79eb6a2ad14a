"""AXLearn's step. A layer's checkpoint is a configuration, which the trainer converts to a dict by
`dataclasses.asdict`. Layers run in a scan. A regular expression selects names. The learner calls
`jax.value_and_grad` of the trainable parameters.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from examples.stacks.training import RATE, Training, copied
from tests.shared.foreign import plain
from tests.shared.foreign.size import Size, cross_entropy, tokens
from tests.shared.shapes.size import SIZE


@dataclasses.dataclass(frozen=True)
class RematSpec:
    prevent_cse: bool = True
    policy: Callable[..., Any] | None = None


def save_by_names(prim, *_, regex: str, **params) -> bool:
    return prim.name == "name" and re.fullmatch(regex, params["name"]) is not None


OWN = RematSpec(False, functools.partial(save_by_names, regex=r".*([qkvo]_proj|context)"))


class State(NamedTuple):
    prng_key: jax.Array
    model: Any
    learner: Any


def layer(x, p, heads: int):
    h = plain.rms(x, p["norm1"])
    split = lambda a: a.reshape(*a.shape[:-1], heads, -1)
    named = lambda name, a: checkpoint_name(a, f"SelfAttention.{name}")
    q = named("q_proj", split(h @ p["q"] + p["bq"]))
    k, v = named("k_proj", split(h @ p["k"])), named("v_proj", split(h @ p["v"] + p["bv"]))
    context = named("context", plain.mixed(q, k, v, plain.causal_mask(x)))
    x = x + named("o_proj", context.reshape(x.shape) @ p["o"])
    h = plain.rms(x, p["norm2"])
    up = checkpoint_name(jax.nn.gelu(h @ p["gate"]) * (h @ p["up"]), "FeedForward.linear1_0")
    return x + checkpoint_name(up @ p["down"], "FeedForward.linear2")


def model(params, batch, heads: int, spec: RematSpec | None):
    def turn(carry, p):
        x, count = carry
        return (layer(x, p, heads), count + 1), None

    if spec is not None:
        turn = jax.checkpoint(turn, **dataclasses.asdict(spec))
    x = params["embedding"][batch["inputs"]]
    (x, count), _ = jax.lax.scan(turn, (x, 0), params["layers"])
    loss = cross_entropy(x @ params["embedding"].T, batch["labels"])
    return loss, {"layers": count, "loss": loss}


class Trainer:
    def __init__(self, heads: int, spec: RematSpec | None):
        self.heads, self.spec = heads, spec

    def train_step(self, state: State, batch):
        key, _ = jax.random.split(state.prng_key)

        def forward(params):
            return model(params, batch, self.heads, self.spec)

        (loss, summaries), gradients = jax.value_and_grad(forward, has_aux=True)(state.model)
        moved = jax.tree.map(lambda p, g: p - RATE * g, state.model, gradients)
        return State(key, moved, state.learner + 1), {"loss": loss, "summaries": summaries}


def training(jit=jax.jit, size: Size = SIZE, spec: RematSpec | None = OWN) -> Training:
    params, data = plain.stacked_parameters(size), tokens(size)
    batch = {"inputs": data[:, :-1], "labels": data[:, 1:]}
    trainer = Trainer(size.heads, spec)
    state = State(jax.random.key(0), params, jnp.zeros((), jnp.int32))
    step = jit(trainer.train_step, donate_argnums=(0,))
    found = lambda args, kwargs, result: (result[1]["loss"], result[0].model)
    return Training(step, lambda: ((copied(state), batch), {}), found, params)

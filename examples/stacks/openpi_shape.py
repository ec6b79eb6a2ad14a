"""openpi's fine-tuning step in its exact shape, since no package index has openpi.

openpi's model: two experts of Linen, whose layers share an attention and run in a scan of
checkpoints with a static argument, and a vision encoder of such a scan, both bridged into NNX. Its
step takes a configuration, a key and then the state, which holds the graph definition, the
optimizer and an average of the parameters. Frozen parameters are not differentiated (`DiffState`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx, struct
from flax.nnx import bridge

from examples.stacks.training import RATE, Training, copied


@dataclasses.dataclass(frozen=True)
class Expert:
    """A decoder's sizes. rank: of its LoRA; 0 trains all of its parameters."""

    width: int = 32
    depth: int = 4
    mlp: int = 64
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 8
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class Vision:
    width: int = 24
    depth: int = 3
    mlp: int = 48
    heads: int = 2
    patch: int = 4


@dataclasses.dataclass(frozen=True)
class Config:
    """What the step is made from.

    policy: the policy of both scans, by its name in `jax.checkpoint_policies`; "none" for no
      checkpoint.
    """

    language: Expert = Expert()
    action: Expert = Expert(width=24, mlp=48)
    vision: Vision = Vision()
    vocab: int = 48
    batch: int = 4
    prompt: int = 16
    side: int = 16
    images: int = 2
    horizon: int = 8
    action_dim: int = 6
    dtype: Any = jnp.float32
    policy: str = "nothing_saveable"
    average: float | None = 0.99

    @property
    def frozen(self):
        """Which parameters are not trained."""
        if not self.language.rank:
            return nnx.Nothing()
        paths = [nnx_path("llm")]
        if not self.action.rank:
            paths.append(nnx.Not(nnx_path("_1")))
        return nnx.All(*paths, nnx.Not(nnx_path("lora")))

    @property
    def trained(self):
        return nnx.All(nnx.Param, nnx.Not(self.frozen))


def nnx_path(part: str):
    """Parameters with a name that contains `part`."""
    return lambda path, value: any(part in str(name) for name in path)


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.zeros_init(), (x.shape[-1],))
        var = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        return (x * jax.lax.rsqrt(var + 1e-6) * (1 + scale)).astype(x.dtype)


class Einsum(nn.Module):
    """A product with weights, and with two of low rank."""

    shape: tuple[int, ...]
    rank: int = 0
    init: Any = nn.initializers.lecun_normal(in_axis=-2, out_axis=-1)

    @nn.compact
    def __call__(self, equation: str, x):
        result = jnp.einsum(equation, x, self.param("w", self.init, self.shape).astype(x.dtype))
        if not self.rank:
            return result
        a = self.param("lora_a", self.init, (*self.shape[:-1], self.rank))
        b = self.param("lora_b", self.init, (*self.shape[:-2], self.rank, self.shape[-1]))
        inputs, result_axes = equation.split("->")
        left, right = inputs.split(",")
        inner = right[:-1] + "l", right[:-2] + "l" + right[-1]
        low_axes = result_axes.replace(right[-1], "l")
        low = jnp.einsum(f"{left},{inner[0]}->{low_axes}", x, a.astype(x.dtype))
        return result + jnp.einsum(f"{low_axes},{inner[1]}->{result_axes}", low, b.astype(x.dtype))


class FeedForward(nn.Module):
    config: Expert

    @nn.compact
    def __call__(self, x):
        c = self.config
        gate = Einsum((c.width, c.mlp), c.rank, name="gate")("BTD,DF->BTF", x)
        up = Einsum((c.width, c.mlp), c.rank, name="up")("BTD,DF->BTF", x)
        return Einsum((c.mlp, c.width), c.rank, name="linear")("BTF,FD->BTD", nn.gelu(gate) * up)


class Attention(nn.Module):
    """One attention over the tokens of all experts, each with projections of its own."""

    configs: tuple[Expert, ...]

    @nn.compact
    def __call__(self, xs, positions, mask):
        qs, ks, vs = [], [], []
        for i, (x, c) in enumerate(zip(xs, self.configs)):
            if x is None:
                continue
            q = Einsum((c.heads, c.width, c.head_dim), c.rank, name=f"q_{i}")("BTD,NDH->BTNH", x)
            kv = (c.kv_heads, c.width, c.head_dim)
            qs.append(q)
            ks.append(Einsum(kv, c.rank, name=f"k_{i}")("BSD,KDH->BSKH", x))
            vs.append(Einsum(kv, c.rank, name=f"v_{i}")("BSD,KDH->BSKH", x))
        q, k, v = (jnp.concatenate(each, axis=1) for each in (qs, ks, vs))
        q, k = rotated(q, positions) * q.shape[-1] ** -0.5, rotated(k, positions)
        batch, length, heads, width = q.shape
        q = q.reshape(batch, length, k.shape[2], heads // k.shape[2], width)
        logits = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32)
        masked = jnp.where(mask[:, :, None], logits, -2.3819763e38)
        probs = jax.nn.softmax(masked, axis=-1).astype(q.dtype)
        encoded = jnp.einsum("BKGTS,BSKH->BTKGH", probs, v).reshape(batch, length, heads, width)
        out, start = [], 0
        for i, (x, c) in enumerate(zip(xs, self.configs)):
            if x is None:
                out.append(None)
                continue
            end = start + x.shape[1]
            weights = Einsum((c.heads, c.head_dim, c.width), c.rank, name=f"out_{i}")
            out.append(weights("BTNH,NHD->BTD", encoded[:, start:end]))
            start = end
        return out


def rotated(x, positions):
    half = x.shape[-1] // 2
    timescale = 10_000 ** (jnp.arange(half, dtype=jnp.float32) / half)
    radians = (positions[..., None] / timescale)[..., None, :]
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(radians), jnp.cos(radians)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class Block(nn.Module):
    configs: tuple[Expert, ...]

    @nn.compact
    def __call__(self, xs, positions, mask, deterministic=True):
        assert isinstance(deterministic, bool)  # static
        named = lambda name, i: name if i == 0 else f"{name}_{i}"
        normed = [
            None if x is None else Norm(name=named("pre_attention_norm", i))(x)
            for i, x in enumerate(xs)
        ]
        attended = Attention(self.configs, name="attn")(normed, positions, mask)
        xs = [None if x is None else x + y for x, y in zip(xs, attended)]
        out = []
        for i, (x, c) in enumerate(zip(xs, self.configs)):
            if x is not None:
                h = Norm(name=named("pre_ffw_norm", i))(x)
                x = x + FeedForward(c, name=named("mlp", i))(h)
            out.append(x)
        return out, None


def scanned(block, depth: int, policy: str, static: int, broadcast: int):
    """A scan over layers, each under a checkpoint whose argument number `static` is static."""
    if policy != "none":
        block = nn.remat(
            block,
            prevent_cse=False,
            static_argnums=(static,),
            policy=getattr(jax.checkpoint_policies, policy, None),
        )
    return nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(nn.broadcast,) * broadcast,
        length=depth,
    )


class Gemma(nn.Module):
    """The decoders of all experts."""

    configs: tuple[Expert, ...]
    vocab: int
    dtype: Any
    policy: str

    def setup(self):
        width = self.configs[0].width
        self.embedder = self.param("embedder", nn.initializers.normal(), (self.vocab, width))
        layers = scanned(Block, self.configs[0].depth, self.policy, static=4, broadcast=3)
        self.layers = layers(self.configs)
        self.final_norms = [
            Norm(name=f"final_norm_{i}" if i else "final_norm") for i in range(len(self.configs))
        ]

    def embed(self, tokens):
        return (self.embedder[tokens] * self.configs[0].width ** 0.5).astype(self.dtype)

    def __call__(self, xs, positions, mask, deterministic=True):
        xs = jax.tree.map(lambda x: x.astype(self.dtype), xs)
        xs, _ = self.layers(xs, positions, mask[:, None], deterministic)
        return [None if x is None else norm(x) for norm, x in zip(self.final_norms, xs)]

    def init_all(self):
        """Makes the parameters."""
        self.embed(jnp.zeros((1, 1), jnp.int32))
        xs = [jnp.zeros((1, 1, c.width)) for c in self.configs]
        n = len(self.configs)
        self(xs, jnp.zeros((1, n), jnp.int32), jnp.zeros((1, n, n), bool))


class EncoderBlock(nn.Module):
    config: Vision
    dtype: Any

    @nn.compact
    def __call__(self, x, deterministic=True):
        assert isinstance(deterministic, bool)
        c = self.config
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(c.heads, dtype=self.dtype, use_bias=False)(h, h)
        h = nn.gelu(nn.Dense(c.mlp, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        return x + nn.Dense(c.width, dtype=self.dtype)(h), None


class Siglip(nn.Module):
    config: Vision
    out: int
    dtype: Any
    policy: str

    @nn.compact
    def __call__(self, images, *, train=False):
        c = self.config
        patches = nn.Conv(
            c.width, (c.patch, c.patch), (c.patch, c.patch), padding="VALID", name="embedding"
        )
        x = patches(images.astype(jnp.float32))
        x = x.reshape(x.shape[0], -1, c.width)
        scale = nn.initializers.normal(1 / c.width**0.5)
        x = (x + self.param("pos_embedding", scale, (1, *x.shape[1:]))).astype(self.dtype)
        blocks = scanned(EncoderBlock, c.depth, self.policy, static=2, broadcast=1)
        x, _ = blocks(c, self.dtype, name="encoderblock")(x, not train)
        x = nn.LayerNorm(dtype=self.dtype, name="encoder_norm")(x)
        return nn.Dense(self.out, dtype=self.dtype, name="head")(x)


class Pi0(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = self.config = config
        llm = Gemma((c.language, c.action), c.vocab, c.dtype, c.policy)
        llm = bridge.ToNNX(llm)
        llm.lazy_init(rngs=rngs, method="init_all")
        image = bridge.ToNNX(Siglip(c.vision, c.language.width, c.dtype, c.policy))
        image.lazy_init(jnp.zeros((1, c.side, c.side, 3)), train=False, rngs=rngs)
        self.PaliGemma = nnx.Dict(llm=llm, img=image)
        width = c.action.width
        self.state_proj = nnx.Linear(c.action_dim, width, rngs=rngs)
        self.action_in_proj = nnx.Linear(c.action_dim, width, rngs=rngs)
        self.time_mlp_in = nnx.Linear(2 * width, width, rngs=rngs)
        self.time_mlp_out = nnx.Linear(width, width, rngs=rngs)
        self.action_out_proj = nnx.Linear(width, c.action_dim, rngs=rngs)

    def compute_loss(self, key, observation, actions, *, train=False):
        noise_key, time_key = jax.random.split(key)
        noise = jax.random.normal(noise_key, actions.shape)
        time = jax.random.uniform(time_key, actions.shape[:1]) * 0.999 + 0.001
        mixed = time[:, None, None]
        noisy, velocity = mixed * noise + (1 - mixed) * actions, noise - actions
        prefix = [self.PaliGemma.img(image, train=train) for image in observation["images"]]
        prefix.append(self.PaliGemma.llm(observation["prompt"], method="embed"))
        prefix = jnp.concatenate(prefix, axis=1)
        embedded = self.action_in_proj(noisy)
        angles = time[:, None] * jnp.exp(-jnp.linspace(0, 8, embedded.shape[-1] // 2))
        moment = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        moment = jnp.broadcast_to(moment[:, None], embedded.shape)
        embedded = self.time_mlp_out(
            nnx.swish(self.time_mlp_in(jnp.concatenate([embedded, moment], -1)))
        )
        suffix = jnp.concatenate([self.state_proj(observation["state"])[:, None], embedded], 1)
        counts = prefix.shape[1], 1, suffix.shape[1] - 1
        block = jnp.repeat(jnp.arange(3), jnp.array(counts), total_repeat_length=sum(counts))
        mask = jnp.broadcast_to(block[:, None] >= block, (len(actions), sum(counts), sum(counts)))
        positions = jnp.broadcast_to(jnp.arange(sum(counts)), mask.shape[:2])
        _, out = self.PaliGemma.llm([prefix, suffix], positions, mask)
        found = self.action_out_proj(out[:, -actions.shape[1] :].astype(jnp.float32))
        return jnp.mean(jnp.square(found - velocity), axis=-1)


@struct.dataclass
class TrainState:
    step: Any
    params: Any
    model_def: Any
    opt_state: Any
    ema_params: Any
    tx: Any = struct.field(pytree_node=False)
    ema_decay: float | None = struct.field(pytree_node=False)


def train_step(config: Config, rng, state: TrainState, batch):
    model = nnx.merge(state.model_def, state.params)
    model.train()

    def loss_fn(model, rng, observation, actions):
        return jnp.mean(model.compute_loss(rng, observation, actions, train=True))

    observation, actions = batch
    differentiated = nnx.DiffState(0, config.trained)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=differentiated)(
        model, jax.random.fold_in(rng, state.step), observation, actions
    )
    params = nnx.filter_state(state.params, config.trained)
    updates, opt_state = state.tx.update(grads, state.opt_state, params)
    nnx.update(model, optax.apply_updates(params, updates))
    new = nnx.state(model)
    average = state.ema_params
    if state.ema_decay is not None:
        mixed = lambda old, new: state.ema_decay * old + (1 - state.ema_decay) * new
        average = jax.tree.map(mixed, average, new)
    state = dataclasses.replace(
        state, step=state.step + 1, params=new, opt_state=opt_state, ema_params=average
    )
    return state, {"loss": loss, "grad_norm": optax.tree.norm(grads)}


def init(config: Config, tx, key) -> TrainState:
    """The first state; frozen parameters are in bfloat16."""
    model = Pi0(config, nnx.Rngs(key))
    params = nnx.state(model)
    half = lambda path, p: p.replace(p.get_value().astype(jnp.bfloat16))
    frozen, rest = nnx.split_state(params, config.frozen, ...)
    frozen = nnx.map_state(half, frozen) if jax.tree.leaves(frozen) else frozen
    params = nnx.merge_state(frozen, rest)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        model_def=nnx.graphdef(model),
        opt_state=tx.init(nnx.filter_state(params, config.trained)),
        ema_params=None if config.average is None else copied(params),
        tx=tx,
        ema_decay=config.average,
    )


def batch_of(config: Config, key):
    c, keys = config, iter(jax.random.split(key, 9))
    observation = {
        "images": [
            jax.random.normal(next(keys), (c.batch, c.side, c.side, 3)) for _ in range(c.images)
        ],
        "prompt": jax.random.randint(next(keys), (c.batch, c.prompt), 0, c.vocab),
        "state": jax.random.normal(next(keys), (c.batch, c.action_dim)),
    }
    return observation, jax.random.normal(next(keys), (c.batch, c.horizon, c.action_dim))


def training(jit=jax.jit, config: Config = Config()) -> Training:
    state = jax.jit(functools.partial(init, config, optax.sgd(RATE)))(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(3), 999))
    moved = lambda p: p + 0.05 * jax.random.normal(next(keys), p.shape, p.dtype)
    params = jax.tree.map(moved, state.params)
    average = None if config.average is None else copied(params)
    state = dataclasses.replace(state, params=params, ema_params=average)
    batch = batch_of(config, jax.random.key(1))
    step = jit(functools.partial(train_step, config), donate_argnums=(1,))
    # Nothing reads the last hidden states of the first expert.
    unread = lambda path, _: path[-2:] == ("final_norm", "scale")
    read = nnx.All(config.trained, nnx.Not(unread))
    return Training(
        step,
        lambda: ((jax.random.key(2), copied(state), batch), {}),
        lambda args, kwargs, result: (result[1]["loss"], nnx.filter_state(result[0].params, read)),
        nnx.filter_state(params, read),
    )

"""Unchanged models of packages, with random weights and without tags: Transformers' models in Flax,
and Equinox's layers. Each function returns (loss, parameters, other arguments).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import transformers

from tests.shared.foreign.size import Size, cross_entropy, normal, perturbed, tokens


def _text(model, s: Size, dropout: bool, keys: bool = True):
    """Returns a language model's loss."""

    def loss(params, batch, key):
        more = {"dropout_rng": key} if keys else {}
        out = model(batch[:, :-1], params=params, train=dropout, **more)
        return cross_entropy(out.logits, batch[:, 1:])

    return loss, perturbed(model.params), (tokens(s), jax.random.key(1))


def _layers(s: Size, wider: int = 4) -> dict[str, int]:
    """Returns the settings that configs of encoders and decoders share."""
    return {
        "num_hidden_layers": s.layers,
        "hidden_size": s.width,
        "num_attention_heads": s.heads,
        "intermediate_size": wider * s.width,
    }


def gpt2(s: Size, dropout=True):
    sizes = {"n_layer": s.layers, "n_embd": s.width, "n_head": s.heads, "n_positions": s.sequence}
    config = transformers.GPT2Config(vocab_size=s.vocab, **sizes)
    model = transformers.FlaxGPT2LMHeadModel(config, input_shape=(1, 8))
    return _text(model, s, dropout)


def bert(s: Size, dropout=True):
    sizes = {"vocab_size": s.vocab, "max_position_embeddings": s.sequence}
    config = transformers.BertConfig(**sizes, **_layers(s))
    return _text(transformers.FlaxBertForMaskedLM(config, input_shape=(1, 8)), s, dropout)


def llama(s: Size):
    sizes = {"vocab_size": s.vocab, "max_position_embeddings": s.sequence}
    config = transformers.LlamaConfig(**sizes, **_layers(s, 2))
    model = transformers.FlaxLlamaForCausalLM(config, input_shape=(1, 8))
    return _text(model, s, dropout=False, keys=False)


def whisper(s: Size, dropout=True):
    """An encoder of sound and a decoder of text, each a Python loop over its layers."""
    sides = {
        f"{side}_{name}": number
        for side in ("encoder", "decoder")
        for name, number in [
            ("layers", s.layers), ("attention_heads", s.heads), ("ffn_dim", 4 * s.width)
        ]
    }  # fmt: skip
    sizes = {"vocab_size": s.vocab, "d_model": s.width, "num_mel_bins": 8}
    lengths = {"max_source_positions": s.sequence, "max_target_positions": s.sequence}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    config = transformers.WhisperConfig(
        **sizes, **sides, **lengths, **ids, decoder_start_token_id=0
    )
    shape = (1, 8, 2 * s.sequence)
    model = transformers.FlaxWhisperForConditionalGeneration(config, input_shape=shape)

    def loss(params, sound, batch, key):
        given = {"params": params, "dropout_rng": key, "train": dropout}
        out = model(sound, decoder_input_ids=batch[:, :-1], **given)
        return cross_entropy(out.logits, batch[:, 1:])

    sound = normal(0, s.batch, *shape[1:], scale=1.0, dtype=jnp.float32)
    return loss, perturbed(model.params), (sound, tokens(s), jax.random.key(1))


def vit(s: Size, dropout=True):
    patch = 4
    side = patch * int(s.sequence**0.5)
    sizes = {"image_size": side, "patch_size": patch, "num_labels": 10}
    config = transformers.ViTConfig(**sizes, **_layers(s))
    model = transformers.FlaxViTForImageClassification(config)

    def loss(params, images, labels, key):
        out = model(images, params=params, dropout_rng=key, train=dropout)
        return cross_entropy(out.logits, labels)

    images = normal(0, s.batch, 3, side, side, scale=1.0, dtype=s.dtype)
    return loss, perturbed(model.params), (images, jnp.arange(s.batch) % 10, jax.random.key(1))


class EquinoxLayer(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, s: Size, key):
        one, two = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(s.width)
        self.attention = eqx.nn.MultiheadAttention(s.heads, s.width, dropout_p=0.1, key=one)
        self.mlp = eqx.nn.MLP(s.width, s.width, 4 * s.width, 1, activation=jax.nn.gelu, key=two)

    def __call__(self, x, key):
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h, key=key)
        return x + jax.vmap(self.mlp)(x)


class EquinoxModel(eqx.Module):
    """Layers in a list, or stacked and run by a scan."""

    embedding: eqx.nn.Embedding
    layers: list | EquinoxLayer
    head: eqx.nn.Linear

    def __init__(self, s: Size, scanned: bool, key):
        *keys, first, last = jax.random.split(key, s.layers + 2)
        make = lambda key: EquinoxLayer(s, key)
        self.embedding = eqx.nn.Embedding(s.vocab, s.width, key=first)
        self.layers = eqx.filter_vmap(make)(jnp.stack(keys)) if scanned else [*map(make, keys)]
        self.head = eqx.nn.Linear(s.width, s.vocab, key=last)

    def __call__(self, tokens, key):
        x = jax.vmap(self.embedding)(tokens)
        if isinstance(self.layers, list):
            for i, layer in enumerate(self.layers):
                x = layer(x, jax.random.fold_in(key, i))
        else:
            arrays, rest = eqx.partition(self.layers, eqx.is_array)
            turn = lambda x, layer: (eqx.combine(layer, rest)(x, key), None)
            x, _ = jax.lax.scan(turn, x, arrays)
        return jax.vmap(self.head)(x)


def equinox_transformer(s: Size, *, scanned: bool):
    model, batch = EquinoxModel(s, scanned, jax.random.key(0)), tokens(s)
    arrays, rest = eqx.partition(model, eqx.is_array)

    def loss(arrays, batch, key):
        keys = jax.random.split(key, len(batch))
        logits = jax.vmap(eqx.combine(arrays, rest))(batch[:, :-1], keys)
        return cross_entropy(logits, batch[:, 1:])

    return loss, perturbed(arrays), (batch, jax.random.key(1))

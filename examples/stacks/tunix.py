"""Tunix's PeftTrainer fine-tunes a Llama 3 under a byte budget.

python -m examples.stacks.tunix [--share 0.6] [--out row.json]
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig, RematConfig
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

import jaxmem
from examples.stacks.training import RATE, Training, main

BATCH, LENGTH, VOCAB = 4, 128, 256
TOKENS = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, VOCAB)
BATCH_OF = TrainingInput(input_tokens=TOKENS, input_mask=jnp.ones(TOKENS.shape, bool))


def model_of(policy: RematConfig) -> Llama3:
    config = ModelConfig(
        num_layers=4, vocab_size=VOCAB, embed_dim=64, hidden_dim=256, num_heads=4, head_dim=16,
        num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5, remat_config=policy,
    )  # fmt: skip
    model = Llama3(config, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    keys = iter(jax.random.split(jax.random.key(2), 999))  # its layers are zero at the start
    moved = lambda p: p + 0.05 * jax.random.normal(next(keys), p.shape, p.dtype)
    return nnx.merge(graph, jax.tree.map(moved, state))


def trainer_of(model: Llama3, rate=RATE) -> PeftTrainer:
    def inputs(batch: TrainingInput):
        positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (BATCH, LENGTH, LENGTH))
        return {
            "input_tokens": batch.input_tokens, "input_mask": batch.input_mask,
            "positions": positions, "attention_mask": mask,
        }  # fmt: skip

    config = TrainingConfig(eval_every_n_steps=100, max_steps=3)
    return PeftTrainer(model, optax.sgd(rate), config).with_gen_model_input_fn(inputs)


def own(trainer: PeftTrainer) -> PeftTrainer:
    """Tunix jits the step that `create_train_step_fn` returns."""
    return trainer


def planned(trainer: PeftTrainer, **plan) -> PeftTrainer:
    step = jaxmem.jit(trainer.create_train_step_fn(), donate_argnames="optimizer", **plan)
    trainer.create_train_step_fn = lambda: step
    return trainer


def train(jit=own, rate=0.01) -> PeftTrainer:
    """Trains by Tunix's own loop, in which Tunix jits the step that it is given."""
    trainer = jit(trainer_of(model_of(RematConfig.NONE), rate))
    trainer.train([BATCH_OF] * 3)
    return trainer


def training(policy: RematConfig = RematConfig.NONE, jit=own) -> Training:
    """One step of the trainer. `own` is jitted with Tunix's options here."""
    model = model_of(policy)
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))

    def arguments():
        model = model_of(policy)
        return (model, trainer_of(model).optimizer, BATCH_OF), {}

    step = jit(trainer_of(model)).create_train_step_fn()
    if jit is own:
        step = nnx.jit(step, donate_argnames=("optimizer",))
    read = lambda args, kwargs, result: (result[0], nnx.state(args[0], nnx.Param))
    return Training(step, arguments, read, before)


POLICIES = {config.name: config for config in RematConfig}

if __name__ == "__main__":
    main("google-tunix", training, planned, POLICIES)

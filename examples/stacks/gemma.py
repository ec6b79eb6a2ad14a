"""A Gemma of the package gemma, trained by Kauldron's step, under a byte budget.

python -m examples.stacks.gemma [--share 0.6] [--out row.json]
"""

import jax
import numpy as np
import optax
from gemma import gm
from kauldron import kd

import jaxmem
from examples.stacks.training import RATE, Training, copied, main

BATCH, LENGTH, VOCAB = 4, 128, 256
TOKENS = np.random.default_rng(1).integers(1, VOCAB, (BATCH, LENGTH + 1))
DATA = {"input": TOKENS[:, :-1].astype("int32"), "target": TOKENS[:, 1:, None].astype("int32")}


def own(step):
    """`kd.train.TrainStep.step`, which Kauldron jits."""
    return step


def planned(step, **plan):
    """`jax.jit` does not tell the static arguments of Kauldron's step, so they are named again."""
    options = {
        "static_argnames": (
            "self", "return_losses", "return_metrics", "return_summaries",
            "checkify_error_categories",
        ),
        "donate_argnames": "state",
    }  # fmt: skip
    return jaxmem.jit(step.__wrapped__, **options, **plan)


def model_of() -> gm.nn.Transformer:
    local, global_ = gm.nn.config.AttentionType.LOCAL_SLIDING, gm.nn.config.AttentionType.GLOBAL
    config = gm.nn.config.TransformerConfig(
        num_embed=VOCAB, embed_dim=64, hidden_dim=256, num_heads=4, num_kv_heads=2, head_dim=16,
        final_logit_softcap=None, use_post_attn_norm=True, use_post_ffw_norm=True,
        attention_types=(local, local, global_) * 2, sliding_window_size=32, use_qk_norm=True,
    )  # fmt: skip
    return gm.nn.Transformer(config=config, tokens="batch.input", dtype=np.float32)


def trainer_of() -> kd.train.Trainer:
    return kd.train.Trainer(
        train_ds=kd.data.InMemoryPipeline(loader=lambda: DATA, batch_size=BATCH),
        model=model_of(),
        optimizer=optax.sgd(RATE),
        train_losses={
            "loss": kd.losses.SoftmaxCrossEntropyWithIntLabels(
                logits="preds.logits", labels="batch.target"
            )
        },
        num_train_steps=3,
    )


def training(policy=None, jit=own) -> Training:
    trainer = trainer_of()
    state = trainer.init_state()
    keys = iter(jax.random.split(jax.random.key(2), 999))
    moved = lambda p: p + 0.05 * jax.random.normal(next(keys), p.shape, p.dtype)
    state = state.replace(params=jax.tree.map(moved, state.params))
    options = lambda: {"state": copied(state), "batch": DATA, "return_losses": True}
    loss_of = lambda aux: aux.compute().loss_values["losses/loss"]
    return Training(
        jit(kd.train.TrainStep.step),
        lambda: ((trainer.trainstep,), options()),
        lambda args, kwargs, result: (loss_of(result[1]), result[0].params),
        state.params,
    )


if __name__ == "__main__":
    main("gemma", training, planned, {"none": None})

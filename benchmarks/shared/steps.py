"""Training steps as the planner gets them, with shapes of their arguments: of our configs, and of
models that know nothing of jaxmem.
"""

import functools
from collections.abc import Callable

import jax

import jaxmem
from experiments.command.load import load
from experiments.config.text import Config
from experiments.running.planning import unplanned
from experiments.steps.step import abstract, make_step
from jaxmem._core.actions import Actions
from jaxmem._core.assignment import Assignment
from tests.shared.foreign import flax_models, libraries, plain
from tests.shared.foreign.size import Size

SIZES = {
    "local": Size(width=128, heads=4, layers=6, batch=8, sequence=144, vocab=256),
    "h200": Size(width=256, heads=8, layers=6, batch=16, sequence=576, vocab=512),
    "h200:8": Size(width=256, heads=8, layers=6, batch=64, sequence=256, vocab=512),
}
# Models that know nothing of jaxmem: `MODELS[name](size)` is (loss, parameters, the rest).
MODELS: dict[str, Callable] = {
    "gemma, a Python loop": plain.gemma_in_a_loop,
    "gemma, a scan": plain.gemma_in_a_scan,
    "gemma, a scan of checkpoints": plain.gemma_in_a_scan_of_checkpoints,
    "microbatches, a chunked loss": plain.microbatches_with_a_chunked_loss,
    "names twice in a layer": plain.names_twice_in_a_layer,
    "mixture of experts": plain.mixture_of_experts,
    "encoder and decoder": plain.encoder_and_decoder,
    "recurrent over time": plain.recurrent_over_time,
    "Linen, nn.scan": functools.partial(flax_models.linen_transformer, scanned=True),
    "Linen, a Python loop": functools.partial(flax_models.linen_transformer, scanned=False),
    "Linen, ResNet with BatchNorm": flax_models.resnet_with_batch_statistics,
    "Transformers, GPT-2": libraries.gpt2,
    "Transformers, BERT": libraries.bert,
    "Transformers, Llama": libraries.llama,
    "Transformers, ViT": libraries.vit,
    "Equinox, a Python loop": functools.partial(libraries.equinox_transformer, scanned=False),
    "Equinox, a scan": functools.partial(libraries.equinox_transformer, scanned=True),
}
RATE = 1e4  # what a parameter moves by is its gradient: the rest is lost in rounding


def of_config(name: str) -> tuple[Callable, tuple]:
    config = load(name, ())
    return functools.partial(make_step, config), abstract(config)


def of_model(model: Callable, size: Size) -> tuple[Callable, tuple]:
    """A model's step under `jaxmem.auto`, and the shapes of its arguments."""
    loss, params, rest = model(size)
    return jaxmem.auto(step_of(loss)), shapes((params, *rest))


def local_step(name: str) -> tuple[Callable, tuple]:
    """The step of one of `MODELS`, or of a config, in a size for this CPU."""
    return of_model(MODELS[name], SIZES["local"]) if name in MODELS else of_config(name)


def step_of(loss: Callable, rate: float = RATE) -> Callable:
    """A training step of gradient descent. At the default rate, the update of a parameter is its
    gradient.
    """

    def step(params, *rest):
        first = lambda params: jax.tree.leaves(loss(params, *rest))[0]
        value, gradients = jax.value_and_grad(first)(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients), value

    return step


def shapes(tree):
    is_shape = lambda a: isinstance(a, jax.ShapeDtypeStruct)
    shape = lambda a: a if is_shape(a) else jax.ShapeDtypeStruct(a.shape, a.dtype)
    return jax.tree.map(shape, tree)


def compile_planned(config: Config, actions: Actions | None):
    """The step under a plan; None is no plan."""
    plan = None if actions is None else Assignment(actions)
    return unplanned(make_step(config, plan), *abstract(config)).step

"""The steps of this folder and of `examples/stacks/openpi_shape.py` by name.

Each step is a function of one of the library's policies, of the model's size, and of the jit that
replaces the library's jit.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import nnx

from examples.stacks import openpi_shape
from examples.stacks.openpi_shape import Config, Expert, Vision
from examples.stacks.training import Training
from tests.shared.foreign.size import Size
from tests.shared.shapes import axlearn, by_name, grug, loops, trainers
from tests.shared.shapes.size import SIZE


class Shape(NamedTuple):
    """make: `make(policy, jit=...)` returns the step.

    policies: the policies of the library, the default first.
    jit: the jit of the library.
    in_a_scan: whether a loop runs the layers.
    """

    make: Callable[..., Training]
    policies: dict
    jit: Callable = jax.jit
    in_a_scan: bool = True


NAMES = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "none")
BY_NAME = {name: name for name in NAMES}
NONE = {"none": None}


def openpi(policy, size: Size = SIZE, rank: int = 0, **options) -> Training:
    """Returns openpi's step, with two experts and a vision encoder of about this size."""
    expert = Expert(
        size.width, size.layers, 2 * size.width, size.heads, 1, size.width // size.heads, rank
    )
    config = Config(
        language=expert,
        action=dataclasses.replace(expert, width=size.width // 2, mlp=size.width),
        vision=Vision(size.width // 2, size.layers, size.width, heads=2),
        vocab=size.vocab,
        batch=size.batch,
        prompt=size.sequence // 4,
        side=4 * int((size.sequence / 4) ** 0.5),
        horizon=size.sequence // 4,
        policy=policy,
        average=None if rank else 0.99,
    )
    return openpi_shape.training(config=config, **options)


SHAPES = {
    "AXLearn": Shape(
        lambda policy, **o: axlearn.training(spec=policy, **o),
        {"by names": axlearn.OWN, "full": axlearn.RematSpec(False), "none": None},
    ),
    "simply": Shape(lambda policy, **o: by_name.simply(policy=policy, **o), BY_NAME),
    "big_vision": Shape(lambda policy, **o: by_name.big_vision(policy=policy, **o), BY_NAME),
    "accumulation": Shape(lambda policy, **o: loops.accumulated(**o), NONE),
    "local and global attention": Shape(
        lambda policy, **o: loops.local_and_global(remat=policy, **o),
        {"checkpoints": True, "none": False},
    ),
    "grug": Shape(
        lambda policy, **o: grug.training(remat=policy, **o),
        {"checkpoint": True, "none": False},
        in_a_scan=False,
    ),
    "Tunix with LoRA": Shape(
        lambda policy, **o: trainers.tunix(remat=policy, **o),
        {"NONE": False, "BLOCK": True},
        nnx.jit,
        in_a_scan=False,
    ),
    "Kauldron": Shape(lambda policy, **o: trainers.kauldron(**o), NONE, in_a_scan=False),
    "Linen": Shape(lambda policy, **o: trainers.linen(**o), NONE, in_a_scan=False),
    "openpi": Shape(openpi, BY_NAME),
    "openpi with LoRA": Shape(functools.partial(openpi, rank=2), BY_NAME),
}

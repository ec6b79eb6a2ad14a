"""The steps of this folder and of `examples/stacks/openpi_shape.py` by name.

Each is a function of a policy, one of the library's own by its name there, the default first, and
of the jit that takes the place of the library's.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import nnx

from examples.stacks import openpi_shape
from examples.stacks.openpi_shape import Config, Expert
from examples.stacks.training import Training
from tests.shared.shapes import axlearn, by_name, grug, loops, trainers


class Shape(NamedTuple):
    """make: `make(policy, jit=...)` is the step.

    policies: the library's own, the default first.
    jit: the library's.
    in_a_scan: whether a loop runs the layers.
    """

    make: Callable[..., Training]
    policies: dict
    jit: Callable = jax.jit
    in_a_scan: bool = True


NAMES = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "none")
BY_NAME = {name: name for name in NAMES}
NONE = {"none": None}
LORA = Config(language=Expert(rank=2), action=Expert(24, mlp=48, rank=2), average=None)
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
    "openpi": Shape(
        lambda policy, **o: openpi_shape.training(config=Config(policy=policy), **o), BY_NAME
    ),
    "openpi with LoRA": Shape(lambda policy, **o: openpi_shape.training(config=LORA, **o), NONE),
}

"""The typed experiment of image classification: as strict as `config.py`, whose kinds of values it
takes.
"""

from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field

from experiments.config.text import Count, NonNegative, Positive, Probability, Section


class Model(Section):
    """A ResNet. `stem`: "imagenet" divides the resolution by four before the first block, "small"
    leaves it.
    """

    depth: Literal[14, 26, 50]
    width: Count = 64  # channels after the stem; a stage ends with 4, 8, 16 and 32 times as many
    classes: Annotated[int, Field(ge=2)]
    stem: Literal["imagenet", "small"]
    dtype: Literal["float32", "bfloat16", "float64"] = (
        "float32"  # of the computation; parameters are float32 at least
    )


class Data(Section):
    path: Annotated[str, Field(min_length=1)] | None = (
        None  # of CIFAR or ImageNet; left out: scikit-learn's digits
    )
    size: Count | None = None  # height and width; left out: the data's own, 224 for ImageNet


class Train(Section):
    steps: Count
    batch: Annotated[int, Field(ge=2)]
    microbatches: Count = 1
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    log_every: Count = 10  # steps between lines where standard error is no terminal
    eval_batches: Count = 16  # at most, spread evenly; fewer where the validation images are fewer

    @pydantic.model_validator(mode="after")
    def _divides(self) -> Self:
        if self.batch % self.microbatches:
            raise ValueError(
                f"train.microbatches: got {self.microbatches}; allowed: a divisor of train.batch,"
                f" {self.batch}"
            )
        if self.batch == self.microbatches:
            raise ValueError(
                f"train.microbatches: got {self.microbatches}; allowed: at most half of"
                f" train.batch, {self.batch}, since"
                " one image has no batch statistics"
            )
        return self


class Optimizer(Section):
    """AdamW; the rate rises over `warmup` steps, then falls as a cosine to `final_rate`.

    `accumulation`: how a batch's microbatches become one step. "scan" adds their gradients up;
    "multi_steps" is optax.MultiSteps; "adama" is jaxmem.adamaw_a; "none" is AdamW on the whole
    batch at once.
    """

    accumulation: Literal["none", "multi_steps", "scan", "adama"] = "scan"
    learning_rate: Positive
    final_rate: NonNegative = 0.0
    warmup: Annotated[int, Field(ge=0)] = 0
    beta1: Probability = 0.9
    beta2: Probability = 0.999
    epsilon: Positive = 1e-8
    weight_decay: NonNegative = 0.0

    @pydantic.model_validator(mode="after")
    def _falls(self) -> Self:
        if self.final_rate > self.learning_rate:
            raise ValueError(
                f"optimizer.final_rate: got {self.final_rate}; allowed: at most"
                " optimizer.learning_rate,"
                f" {self.learning_rate}"
            )
        return self


class ImageConfig(Section):
    model: Model
    data: Data = Data()
    train: Train
    optimizer: Optimizer

    @pydantic.model_validator(mode="after")
    def _agrees(self) -> Self:
        o, t = self.optimizer, self.train
        if o.warmup > t.steps:
            raise ValueError(
                f"optimizer.warmup: got {o.warmup}; allowed: at most train.steps, {t.steps}"
            )
        if o.accumulation == "none" and t.microbatches > 1:
            raise ValueError(
                f"train.microbatches: got {t.microbatches}; allowed with optimizer.accumulation ="
                " 'none': 1, since the"
                " whole batch is one"
            )
        return self

"""The settings of image classification."""

from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field

from experiments.config import sections
from experiments.config.sections import Count, Dtype, Mesh, Path, Section


class Model(Section):
    """A ResNet. `stem`: "imagenet" divides the resolution by four before the first block; "small"
    keeps the resolution.
    """

    depth: Literal[14, 26, 50]
    width: Count = 64  # channels after the stem; the stages end with 4, 8, 16 and 32 times `width`
    classes: Annotated[int, Field(ge=2, le=sections.LARGEST)]
    stem: Literal["imagenet", "small"]
    dtype: Dtype = "float32"  # dtype of computation; parameters are float32 at least


class Data(Section):
    path: Path | None = None  # folder of CIFAR or ImageNet; default: scikit-learn's digits
    size: Count | None = None  # height and width; default: the size of the data, 224 for ImageNet


class Train(sections.Train):
    @pydantic.model_validator(mode="after")
    def _has_statistics(self) -> Self:
        if self.batch == self.microbatches:
            raise ValueError(
                f"train.microbatches: got {self.microbatches}; allowed: at most half of"
                f" train.batch, {self.batch}, since one image has no batch statistics"
            )
        return self


class Optimizer(sections.Optimizer):
    """`accumulation`: the update from a batch's microbatches. "scan" sums their gradients;
    "multi_steps" is optax.MultiSteps; "adama" is jaxmem.adamaw_a; "none" is one update from the
    whole batch.
    """

    accumulation: Literal["none", "multi_steps", "scan", "adama"] = "scan"
    final_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0


class ImageConfig(sections.Trained):
    model: Model
    data: Data = Data()
    train: Train
    optimizer: Optimizer
    mesh: Mesh = Mesh()

    @pydantic.model_validator(mode="after")
    def _divides_rows(self) -> Self:
        sizes = self.mesh.sizes
        if key := next((key for key in ("tensor", "expert") if sizes[key] != 1), None):
            raise ValueError(
                f"mesh.{key}: got {sizes[key]}; allowed for a ResNet: 1, since mesh.data and"
                " mesh.fsdp divide it"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.optimizer.accumulation == "none" and self.train.microbatches > 1:
            raise ValueError(
                f"train.microbatches: got {self.train.microbatches}; allowed with"
                " optimizer.accumulation = 'none': 1, since the whole batch is one"
            )
        if self.optimizer.accumulation == "adama":
            sections.refuse_folding(self.optimizer, "optimizer.accumulation = 'adama'")
        sections.refuse_rows(self.optimizer, self.optimizer.accumulation == "adama")
        return self

"""Common settings of all experiments: the types of settings, and the sections `train` and
`optimizer`. Sections allow no unknown keys, no conversions and no nan.
"""

from typing import Annotated, Literal, Self

import pydantic
from pydantic import AfterValidator, Field

LARGEST = 2**31 - 1  # a step's number is an int32

Count = Annotated[int, Field(ge=1, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
Dtype = Literal["float32", "bfloat16", "float64"]


def _without_nul(path: str) -> str:
    if "\0" in path:
        raise ValueError(f"got {path!r}; allowed: a path, which has no NUL character")
    return path


Path = Annotated[str, Field(min_length=1), AfterValidator(_without_nul)]


def _not_zero(size: int) -> int:
    if size == 0:
        raise ValueError("got 0; allowed: at least 1, or -1 for the devices that remain")
    return size


Axis = Annotated[int, Field(ge=-1, le=LARGEST), AfterValidator(_not_zero)]


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True)


class Train(Section):
    """The number of steps, and the size of a batch. `microbatches` divide a batch equally."""

    steps: Count
    batch: Count
    microbatches: Count = 1
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    log_every: Count = 10  # steps between log lines if standard error is no terminal
    eval_batches: Count = 16  # largest number of evaluation batches, spread evenly over the data
    save_every: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 300.0  # seconds
    tensorboard: bool = False  # also write rows for TensorBoard

    @pydantic.model_validator(mode="after")
    def _divides(self) -> Self:
        if self.batch % self.microbatches:
            raise ValueError(
                f"train.microbatches: got {self.microbatches}; allowed: a divisor of train.batch,"
                f" {self.batch}"
            )
        return self


class Optimizer(Section):
    """The rate rises over `warmup` steps, then falls as a cosine to `final_ratio` of its peak at
    the last step. `name`: AdamW; Lion, without `epsilon`; or SGD with the momentum `beta1`.
    `second_moment`: the argument of `jaxmem.adama`, for folded microbatches. `moments`: how the
    optimizer's moments are stored, "int8" in 8 bits a value.
    """

    name: Literal["adamw", "lion", "sgd"] = "adamw"
    learning_rate: Positive
    warmup: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    final_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.1
    beta1: Probability = 0.9
    beta2: Probability = 0.999
    epsilon: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    second_moment: Literal["squares", "row"] = "squares"
    moments: Literal["float", "int8"] = "float"


def refuse_folding(optimizer: Optimizer, way: str) -> None:
    """Raises ValueError unless the optimizer is AdamW, since AdamA accumulates (`way`)."""
    if optimizer.name != "adamw":
        raise ValueError(
            f"optimizer.name: got {optimizer.name!r}; allowed with {way}: 'adamw', since"
            " microbatches are folded into Adam's moments"
        )


def refuse_rows(optimizer: Optimizer, folds: bool) -> None:
    """Raises ValueError if a row ratio is requested and microbatches are not folded (`folds`)."""
    if optimizer.second_moment == "row" and not folds:
        raise ValueError(
            "optimizer.second_moment: got 'row'; allowed where microbatches are folded into AdamW's"
            " moments: optimizer.accumulation = 'adama', or 'released' of a text model"
        )


class Mesh(Section):
    """The mesh of devices, by the sizes of its axes; at most one size is -1, and takes the devices
    that remain. Default: one device, without a mesh.

    `data`, `fsdp` and `expert` divide the rows of a batch; `fsdp` also divides parameters and
    moments; `tensor` divides the features inside a layer; `expert` also divides a layer's experts.
    `experiments/models/sharding.py` has the rules.
    `axes`: "auto", or "explicit" for arrays whose types show their division, also inside the step
    of a GPT without experts or of a Llama. `sequence`: whether `tensor` divides the activations
    between two layers along the sequence (Korthikanti et al., 2022).
    """

    data: Axis = 1
    fsdp: Axis = 1
    tensor: Axis = 1
    expert: Axis = 1
    axes: Literal["auto", "explicit"] = "auto"
    sequence: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, by its name, in the order of the mesh."""
        return {name: getattr(self, name) for name in ("data", "fsdp", "tensor", "expert")}

    @property
    def divides(self) -> bool:
        """Whether more than one device may be used."""
        return set(self.sizes.values()) != {1}

    @pydantic.model_validator(mode="after")
    def _has_one_rest(self) -> Self:
        if list(self.sizes.values()).count(-1) > 1:
            raise ValueError(
                f"mesh: got {', '.join(f'{name} = {size}' for name, size in self.sizes.items())};"
                " allowed: one -1, for the devices that remain"
            )
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "mesh.sequence: got true beside mesh.tensor = 1; allowed beside a larger axis,"
                " which divides the sequence"
            )
        return self


class Trained(Section):
    """An experiment that trains. Each kind of experiment narrows both sections, and adds more."""

    train: Train
    optimizer: Optimizer

    def of_size(self, batch: int | None) -> Self:
        """Returns the config with `batch` as `train.batch`, unchanged if None."""
        if batch is None:
            return self
        return self.model_copy(update={"train": self.train.model_copy(update={"batch": batch})})

    @pydantic.model_validator(mode="after")
    def _warms_up_in_time(self) -> Self:
        if self.optimizer.warmup > self.train.steps:
            raise ValueError(
                f"optimizer.warmup: got {self.optimizer.warmup}; allowed: at most train.steps,"
                f" {self.train.steps}"
            )
        return self

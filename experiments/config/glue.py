"""The settings of fine-tuning on a GLUE task: the settings for text, with a task as the data."""

from typing import Annotated, ClassVar, Literal, Self

import pydantic
from pydantic import Field

from experiments.config.glue_tasks import TaskName
from experiments.config.models import Model
from experiments.config.sections import LARGEST, Path
from experiments.config.text import Config, Data, Sample, States, Train


class GlueModel(Model):
    """A BERT. `vocab`: at least the bytes, [MASK], [CLS], [SEP] and [PAD] (`data/tokens.py`)."""

    kind: Literal["bert_glue"] = "bert_glue"
    vocab: Annotated[int, Field(ge=260, le=LARGEST)] = 260


class GlueData(Data):
    """`path`: the folder of the GLUE download, with a folder for each task."""

    path: Path  # pyright: ignore[reportGeneralTypeIssues]  # has a default in `Data`
    task: TaskName


class GlueTrain(Train):
    """`sequence`: number of tokens of an example, cut or padded. Evaluation uses all examples."""

    sequence: Annotated[int, Field(ge=8, le=LARGEST)]
    loss_chunk: ClassVar[int] = 1  # each example has one loss
    eval_batches: ClassVar[int] = 0


class GlueConfig(Config):
    model: GlueModel
    data: GlueData  # pyright: ignore[reportGeneralTypeIssues]  # has a default in `Config`
    train: GlueTrain
    states: ClassVar[States] = States()  # all on the device
    sample: ClassVar[Sample] = Sample()  # a BERT generates no text

    @pydantic.model_validator(mode="after")
    def _stays(self) -> Self:
        if "states" in self.plan.decided:
            raise ValueError(
                f"plan.decide: got {self.plan.decide}; allowed for a GLUE task: ['actions']"
            )
        return self

"""The typed experiment of fine-tuning on a GLUE task: that on text, with a task in its place."""

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
    """`path`: the folder of the GLUE download, with one for each task."""

    path: Path  # pyright: ignore[reportGeneralTypeIssues]  # has a default in `Data`
    task: TaskName


class GlueTrain(Train):
    """`sequence`: tokens of an example, cut or padded. Every validation example is used."""

    sequence: Annotated[int, Field(ge=8, le=LARGEST)]
    loss_chunk: ClassVar[int] = 1  # there is one loss an example
    eval_batches: ClassVar[int] = 0


class GlueConfig(Config):
    model: GlueModel
    data: GlueData  # pyright: ignore[reportGeneralTypeIssues]  # has a default in `Config`
    train: GlueTrain
    states: ClassVar[States] = States()  # all on the device
    sample: ClassVar[Sample] = Sample()  # of which a BERT has none

    @pydantic.model_validator(mode="after")
    def _stays(self) -> Self:
        if "states" in self.plan.decided:
            raise ValueError(
                f"plan.decide: got {self.plan.decide}; allowed for a GLUE task: ['actions']"
            )
        return self

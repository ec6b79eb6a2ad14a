"""GLUE's tasks (Wang et al., 2018): the columns of their files, their labels and their metrics."""

import dataclasses
from typing import Literal

TaskName = Literal["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE", "WNLI"]
LOWEST, HIGHEST = 0.0, 5.0  # the range of a regression's scores


@dataclasses.dataclass(frozen=True)
class Task:
    """`texts`: the columns of one text or two. `labels`: the classes in order; empty if the label
    is a score.

    `columns`: the columns of labelled files without a header. `dev`: the labelled files for
    validation.
    `divided`: whether a line break in a text divides some rows of the download. Such rows cannot
    be joined again.
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    label: str = "label"
    columns: tuple[str, ...] = ()
    dev: tuple[str, ...] = ("dev",)
    divided: bool = False

    @property
    def outputs(self) -> int:
        """Number of outputs of the model's last layer: one score, or one score for each class."""
        return len(self.labels) or 1


SENTENCE, PAIR = ("sentence",), ("sentence1", "sentence2")
NO_YES, ENTAILS = ("0", "1"), ("entailment", "not_entailment")

TASKS: dict[TaskName, Task] = {
    "CoLA": Task(SENTENCE, NO_YES, ("matthews",), columns=("source", "label", "mark", "sentence")),
    "SST-2": Task(SENTENCE, NO_YES),
    "MRPC": Task(("#1 String", "#2 String"), NO_YES, ("accuracy", "f1"), label="Quality"),
    "STS-B": Task(PAIR, (), ("pearson", "spearman"), label="score"),
    "QQP": Task(
        ("question1", "question2"), NO_YES, ("accuracy", "f1"), label="is_duplicate", divided=True
    ),
    "MNLI": Task(
        PAIR,
        ("entailment", "neutral", "contradiction"),
        label="gold_label",
        dev=("dev_matched", "dev_mismatched"),
    ),
    "QNLI": Task(("question", "sentence"), ENTAILS),
    "RTE": Task(PAIR, ENTAILS),
    "WNLI": Task(PAIR, NO_YES),
}

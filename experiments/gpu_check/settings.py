"""What a part is told, and the models that parts measure."""

import dataclasses
import json
import pathlib

from experiments.command.load import load
from experiments.config.text import Config

TINY = (
    "model.layers=2", "model.width=32", "model.heads=2", "model.vocab=256", "model.dtype=float32",
    "train.batch=4", "train.sequence=32", "train.loss_chunk=16",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of one part. `module` measures it and `out` is its file; `seconds`: how long it may go on
    starting points.

    `small` rehearses it on a CPU. `model`: the config that it is about, where it could be about
    several. `data`: a
    text file. `cache`: where compiled programs, measured times and checkpoints lie, to go on with.
    """

    part: str
    module: str
    out: str
    cache: str
    seconds: float
    small: bool = False
    model: str | None = None
    data: str | None = None

    @property
    def path(self) -> pathlib.Path:
        return pathlib.Path(self.out)

    @property
    def command(self) -> str:
        """How to run it again; where files lie is left out."""
        data = " --data FILE" if self.data else ""
        return (
            "python -m experiments.gpu_check --out DIR --part"
            f" {self.part}{data}{' --small' if self.small else ''}"
        )

    def config(self, name: str | None = None, *overrides: str) -> Config:
        """The config `name`, else the part's model; tiny in a rehearsal, despite `overrides`."""
        return load(name or self.model or "gpt_nano", (*overrides, *(TINY if self.small else ())))

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def read(text: str) -> "Settings":
        return Settings(**json.loads(text))

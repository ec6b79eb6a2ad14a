"""The settings of a part, and the models that parts measure."""

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
    """The settings of one part. `module` measures the part, and `out` is its file. `seconds`: the
    time after which no point starts.

    `small`: rehearse on a CPU. `model`: the config to measure, if the part has no config of its
    own. `data`: a text file. `cache`: the folder of compiled programs, measured times and
    checkpoints, for resuming.
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
        """The command that repeats the part, without the paths of files."""
        data = " --data FILE" if self.data else ""
        return (
            "python -m experiments.gpu_check --out DIR --part"
            f" {self.part}{data}{' --small' if self.small else ''}"
        )

    def config(self, name: str | None = None, *overrides: str) -> Config:
        """Returns the config `name` (default: the part's model). A rehearsal has tiny sizes."""
        return load(name or self.model or "gpt_nano", (*overrides, *(TINY if self.small else ())))

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def read(text: str) -> "Settings":
        return Settings(**json.loads(text))

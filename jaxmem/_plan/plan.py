"""Plan: what was decided, frozen; `jaxmem/_plan/file.py` is its JSON, `jaxmem/_plan/text.py` its
table.
"""

import dataclasses
import os
from typing import Any

from jaxmem._core.actions import KEEP, REST, Actions, Choice
from jaxmem._core.files import read_json, write_json
from jaxmem.errors import PlanFileError, StepError, TagError


@dataclasses.dataclass(frozen=True)
class Row:
    """One tag's line of the table: bytes and milliseconds of one layer."""

    block: str
    tag: str
    kind: str | None
    shape: tuple[int, ...]
    dtype: str
    choice: Choice
    bytes_before: int
    bytes_after: int
    milliseconds: float
    why: str
    layers: int = 1  # how many of them are alive at once


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Device bytes of a compiled step by what they hold; `working` is what neither of the others
    accounts for.
    """

    arguments: int
    saved: int
    working: int


@dataclasses.dataclass(frozen=True)
class Point:
    """A plan that was solved for: bytes of the whole step on one device, and seconds of a step,
    both predicted.
    """

    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Draft:
    """Actions that `build` can be given before they are a Plan. A block that they do not name is
    recomputed.
    """

    actions: Actions = dataclasses.field(default_factory=dict)

    def choices_for(self, block: str) -> dict[str, Choice] | None:
        return dict(self.actions.get(block, {}))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step's actions, and what they cost.

    Bytes are of the whole step on one device: arguments + temporaries + outputs - what is aliased.
    `predicted_bytes` was said before the compile that gave `compiled_bytes`. `baseline_bytes` is
    the step with everything kept.
    `host_bytes` lie in host memory. Seconds are of one step, from `time_source`. `microbatches`:
    how many were chosen, None where the planner was not asked to.
    """

    actions: Actions
    budget_bytes: int
    predicted_bytes: int
    compiled_bytes: int
    baseline_bytes: int
    host_bytes: int
    predicted_seconds: float
    baseline_seconds: float
    profile_seconds: float
    solve_seconds: float
    compile_seconds: float
    compiles: int
    time_source: str
    target: str
    fingerprint: str
    jax_version: str
    parts: Bytes
    baseline_parts: Bytes
    points: tuple[Point, ...] = ()
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    microbatches: int | None = None
    _step: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def step(self):
        """The verified executable, called as the step is. Raises StepError if it was compiled for
        another device.
        """
        if self._step is None:
            raise StepError(
                "Plan.step: this plan holds no executable: it was loaded, or compiled for target"
                f" {self.target!r}, which is"
                " not this device; compile the step with jax.jit(build(plan), donate_argnums=0)"
            )
        return self._step

    @property
    def keeps_everything(self) -> bool:
        return all(choices.get(REST) == KEEP for choices in self.actions.values())

    def choices_for(self, block: str) -> dict[str, Choice]:
        """What becomes of each tag of a block; raises TagError if the plan knows no block of that
        label.
        """
        if block not in self.actions:
            raise TagError(
                f"remat_policy: the plan knows no block {block!r}; it was made for"
                f" {', '.join(map(repr, self.actions))}:"
                " give `block` one of these, or plan this model anew"
            )
        return dict(self.actions[block])

    def pareto(self) -> tuple[Point, ...]:
        """Least step time against bytes, as predicted, from the least bytes to everything kept."""
        return self.points

    def save(self, path: str | os.PathLike) -> None:
        """Writes the plan as JSON. The file appears whole or not at all."""
        from jaxmem._plan.file import to_json

        write_json(path, to_json(self))

    @staticmethod
    def load(path: str | os.PathLike) -> "Plan":
        """Reads a plan. Raises PlanFileError, naming the field, if the file is broken or of another
        schema.
        """
        from jaxmem._plan.file import from_json

        try:
            data = read_json(path)
        except (OSError, ValueError) as error:
            raise PlanFileError(
                f"Plan.load: cannot read {str(path)!r}: {error}; expected a file that Plan.save"
                " wrote"
            ) from error
        return from_json(data, str(path))

    def report(self, path: str | os.PathLike, run: str | os.PathLike | None = None) -> None:
        """Writes a page about the plan: one HTML file that needs no other. It appears whole or not
        at all.

        `run` is a folder of the plan's results: its metrics.jsonl and summary.json, where present,
        are shown too. Raises PlanFileError if one of them is broken.
        """
        from jaxmem._report.report import report_plan

        report_plan(self, path, run)

    def __str__(self) -> str:
        from jaxmem._plan.text import table

        return table(self)

"""The step time, the throughput and the bytes of a step over sizes of the batch and budgets."""

import dataclasses
import os
from typing import Any

from jaxmem._core.bytes import parse_budget, show_bytes
from jaxmem._core.files import read_json, write_json
from jaxmem._core.lists import aligned
from jaxmem._core.reader import Broken, Count, Name, Reader, named
from jaxmem._result.plan.file import SCHEMA, plan_of, without_schema
from jaxmem._result.plan.plan import Plan
from jaxmem._result.svg import show_ms
from jaxmem.errors import BudgetError, StepError


@dataclasses.dataclass(frozen=True)
class Cell:
    """The fastest plan for one size and one budget, as estimates predict it.

    batch: the size.
    budget_bytes: the budget.
    bytes: estimated bytes of the step on one device; compiled bytes if a compiled plan fits that
      did not fit by its estimate. If no plan fits, the bytes of the smallest plan: estimated bytes,
      or compiled bytes if jaxmem compiled the cell.
    host_bytes: estimated bytes in host memory, for one device.
    seconds: estimated seconds of one step, scaled to the compiled plans of the frontier. None if no
      plan fits.
    microbatches: the number of microbatches. None if `build` decides it.
    plan: the compiled plan of the cell. None for a cell that was not compiled.
    """

    batch: Count
    budget_bytes: Count
    bytes: int
    host_bytes: int = 0
    seconds: float | None = None
    microbatches: Count | None = None
    plan: Plan | None = None

    @property
    def throughput(self) -> float:
        """Estimated examples a second, `batch / seconds`; 0 if no plan fits."""
        return self.batch / self.seconds if self.seconds else 0.0

    @property
    def compiled_throughput(self) -> float:
        """`batch / plan.predicted_seconds`; 0 without a compiled plan, or without a time of it."""
        seconds = 0.0 if self.plan is None else self.plan.predicted_seconds
        return self.batch / seconds if seconds else 0.0


@dataclasses.dataclass(frozen=True)
class Frontier:
    """The step time, the throughput and the bytes of a step for each size of its batch and for each
    budget. The numbers are estimates. For each budget, the size of the highest estimated throughput
    is compiled.

    `jaxmem.plans.frontier` makes a frontier, and `Frontier.load` reads a frontier from a file.

    Attributes:
      cells: the cells, by rising size, and by rising budget for each size. A cell has `batch`,
        `budget_bytes`, `bytes`, `host_bytes`, `seconds`, `microbatches`, `throughput` and `plan`.
        `seconds` is None if no plan fits, and `bytes` are then the bytes of the smallest plan.
        `plan` is None for cells that were not compiled.
      target: the name of the target.
      usable_bytes: the target's usable memory.
      time_source: the source of the times of pieces, as `Plan.time_source`.
      tokens: the number of tokens of one example. None if it was not given.
    """

    cells: tuple[Cell, ...]
    target: Name
    usable_bytes: Count
    time_source: Name
    tokens: Count | None = None

    @property
    def batches(self) -> tuple[int, ...]:
        """The sizes, in ascending order."""
        return tuple(sorted({cell.batch for cell in self.cells}))

    @property
    def budgets(self) -> tuple[int, ...]:
        """The budgets in bytes, in ascending order."""
        return tuple(sorted({cell.budget_bytes for cell in self.cells}))

    def best(self, budget: int | float | str) -> Plan:
        """Returns the compiled plan of the highest throughput that fits a budget. `Plan.batch` is
        the size. A plan of a smaller budget fits too, and is returned if it is the fastest.

        budget: one of the frontier's budgets, in the forms of `jaxmem.plan`.

        Raises StepError for another budget, and BudgetError, with the least bytes, if no plan fits.
        """
        size = parse_budget(budget, self.usable_bytes)
        if size not in self.budgets:
            raise StepError(
                f"Frontier.best: `budget` is {budget!r} ({size} bytes); expected one of the"
                f" frontier's budgets, {', '.join(map(str, self.budgets))} bytes"
            )
        cell = self.best_cell(size)
        if cell is None or cell.plan is None:
            least = self.least_bytes(size)
            raise BudgetError(
                f"Frontier.best: no size fits a budget of {show_bytes(size)}: the least is"
                f" {show_bytes(least)} ({least} bytes); expected a larger budget, or a frontier"
                " with a smaller size in `batches`",
                least_bytes=least,
            )
        return cell.plan

    def best_cell(self, budget: int) -> Cell | None:
        """The cell whose plan `best` returns; None if no plan fits. `budget` is in bytes."""
        compiled = [c for c in self.cells if c.budget_bytes <= budget and c.plan is not None]
        return max(compiled, key=lambda cell: cell.compiled_throughput, default=None)

    def least_bytes(self, budget: int) -> int:
        """The bytes of the smallest cell of a budget. `budget` is in bytes."""
        return min(cell.bytes for cell in self.cells if cell.budget_bytes == budget)

    def pareto(self) -> tuple[Cell, ...]:
        """Returns the cells for which no other cell has at most as many bytes and at least the
        estimated throughput, by rising bytes. Of cells with equal numbers, the cell of the smallest
        budget is returned.
        """
        front: list[Cell] = []
        ordered = sorted(self.cells, key=lambda c: (c.bytes, -c.throughput, c.budget_bytes))
        for cell in ordered:
            if cell.throughput > (front[-1].throughput if front else 0.0):
                front.append(cell)
        return tuple(front)

    @property
    def unit(self) -> str:
        """The unit of `rate`: tokens a second if `tokens` is known, else examples a second."""
        return "examples/s" if self.tokens is None else "tokens/s"

    def rate(self, throughput: float) -> float:
        """A throughput, in examples a second, converted to `unit`."""
        return throughput * (self.tokens or 1)

    def rates(self, throughput: float) -> str:
        """A throughput in words: examples a second, and tokens a second if `tokens` is known."""
        tokens = f", {show_rate(throughput * self.tokens)} tokens/s" if self.tokens else ""
        return f"{show_rate(throughput)} examples/s{tokens}"

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the frontier's file, as plain dicts, lists, texts and numbers."""
        data = {"schema": SCHEMA} | _READER.plain(self)
        for cell, content in zip(self.cells, data["cells"]):
            if cell.plan is not None:
                content["plan"] = cell.plan.to_json()
        return data

    def save(self, path: str | os.PathLike) -> None:
        """Writes the frontier, with its compiled plans, as JSON. The file appears whole or not at
        all.

        path: the file.

        Raises OSError if the file cannot be written.
        """
        write_json(path, self.to_json())

    @staticmethod
    def load(path: str | os.PathLike) -> "Frontier":
        """Reads a frontier that `save` wrote. Its plans have no executable until `jaxmem.verify`
        compiles their steps.

        path: the file.

        Raises PlanFileError if the file is broken or has another schema; the message names the
        field.
        """
        wrote, mend = "a file that Frontier.save wrote", "make the frontier again, or mend the file"
        with named("Frontier.load:", path, wrote, mend):
            found = _READER.read(Frontier, without_schema(read_json(path)))
            pairs = {(cell.batch, cell.budget_bytes) for cell in found.cells}
            every = [(batch, budget) for batch in found.batches for budget in found.budgets]
            if not every or len(pairs) != len(found.cells) or len(pairs) != len(every):
                raise Broken(found.cells, "one cell for each size and each budget", "cells")
            return found

    def __str__(self) -> str:
        return "\n".join([*aligned(self.table()), *self.summary()])

    def table(self) -> list[list[str]]:
        """The lines of the table: the head, and a line for each size with a cell for each budget.
        `*` marks the cells of `pareto`.
        """
        marked = {(cell.batch, cell.budget_bytes) for cell in self.pareto()}
        lines = {batch: [str(batch)] for batch in self.batches}
        for c in sorted(self.cells, key=lambda c: c.budget_bytes):
            text = f"needs {show_bytes(c.bytes)}"
            if c.seconds is not None:
                rate = show_rate(self.rate(c.throughput))
                text = f"{show_ms(1e3 * c.seconds)}, {rate}/s, {show_bytes(c.bytes)}"
            lines[c.batch].append(text + (" *" if (c.batch, c.budget_bytes) in marked else ""))
        return [["batch", *map(show_bytes, self.budgets)], *lines.values()]

    def summary(self) -> list[str]:
        """The lines under the table: its units, and the best size for each budget."""
        lines = [
            f"(step time, {self.unit} and bytes of one device on {self.target}, as estimated; times"
            f" of pieces: {self.time_source}; * no cell of as few bytes has more {self.unit})"
        ]
        for budget in self.budgets:
            cell = self.best_cell(budget)
            if cell is None or (plan := cell.plan) is None or cell.seconds is None:
                least = show_bytes(self.least_bytes(budget))
                lines.append(f"{show_bytes(budget)}: no size fits, the least needs {least}")
                continue
            lines.append(
                f"{show_bytes(budget)}: batch {cell.batch}, compiled to"
                f" {show_bytes(plan.compiled_bytes)} (estimated {show_bytes(cell.bytes)}),"
                f" {show_ms(1e3 * plan.predicted_seconds)} a step (estimated"
                f" {show_ms(1e3 * cell.seconds)}), {self.rates(cell.compiled_throughput)}"
            )
        return lines


def load_result(path: str | os.PathLike) -> Plan | Frontier:
    """Reads a file that `Plan.save` or `Frontier.save` wrote.

    Raises PlanFileError, which names the field, if the file is neither.
    """
    try:
        data = read_json(path)
    except (OSError, ValueError):  # `Plan.load` reports the error
        data = None
    return (Frontier if isinstance(data, dict) and "cells" in data else Plan).load(path)


def show_rate(rate: float) -> str:
    """A rate with at least three digits."""
    return f"{rate:,.{0 if rate >= 100 else 1 if rate >= 10 else 2}f}"


_READER = Reader(strict=True, special={Plan: lambda value, _: plan_of(Plan, value)})

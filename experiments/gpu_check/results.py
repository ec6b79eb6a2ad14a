"""A part's file: rows by point, each written at once, and which point is being measured, so that a
part can go on.
"""

import json
import math
import pathlib
from typing import Any

from experiments.errors import InputError
from jaxmem.runs import write_whole

MOST_CUTS = 2  # a point that was cut so often is given up
SAME = ("small", "versions", "device")  # results are of one machine and its software


class Results:
    """What the file at `path` says, or nothing yet. One process at a time writes it."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        try:
            self.data: dict[str, Any] = (
                json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            )
            self.rows: dict[str, dict] = self.data.setdefault("rows", {})
        except (ValueError, AttributeError) as error:
            raise InputError(
                f"--out: {path} is no file of results: {error}; remove it, or name another folder"
            ) from error

    @property
    def running(self) -> str | None:
        return self.data.get("running")

    def describe(self, about: dict) -> None:
        """Says where rows come from; raises InputError if those in the file come from elsewhere."""
        for key in SAME:
            if self.rows and self.data.get(key) != about[key]:
                raise InputError(
                    f"--out: {self.path.name} holds results with {key} {self.data.get(key)!r}, and"
                    f" this is {about[key]!r};"
                    " name another folder"
                )
        self.data = about | {k: v for k, v in self.data.items() if k not in about}
        self._write()

    def begin(self, point: str) -> None:
        self.data["running"] = point
        self._write()

    def add(self, point: str, row: dict) -> None:
        self.rows[point] = finite(row)
        self.data["running"] = None
        self._write()

    def cut(self, why: str) -> None:
        """The point that was being measured did not end: it is tried again, up to a limit."""
        point = self.running
        if point is None:
            return
        cuts = self.data.setdefault("cuts", {})
        cuts[point] = cuts.get(point, 0) + 1
        if cuts[point] >= MOST_CUTS:
            self.add(point, {"error": f"given up after {cuts[point]} tries: {why}"})
        self.data["running"] = None
        self._write()

    def end(self, **said) -> None:
        self.data |= finite(said)
        self._write()

    def forget_errors(self) -> None:
        for point in [p for p, row in self.rows.items() if "error" in row]:
            del self.rows[point]
            self.data.get("cuts", {}).pop(point, None)
        self._write()

    def _write(self) -> None:
        last = ("summary", "rows")
        self.data = {k: v for k, v in self.data.items() if k not in last} | {
            k: self.data[k] for k in last if k in self.data
        }
        write_whole(self.path, json.dumps(self.data, indent=1, allow_nan=False) + "\n")


def finite(value):
    """`value` with numbers that JSON has no word for, such as nan, as text."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

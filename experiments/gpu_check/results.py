"""The file of a part. It has a row for each point, written at once, and the name of the running
point, so that a stopped part can resume.
"""

import json
import math
import pathlib
from typing import Any

from experiments.errors import InputError
from jaxmem.runs import write_whole

MOST_CUTS = 2  # number of interruptions after which a point fails
SAME = ("small", "versions", "device")  # a file has results of one machine and its software


class Results:
    """The content of the file at `path`, empty for a new file. One process at a time writes it."""

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
        """Writes the origin of the rows. Raises InputError if existing rows have another origin."""
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
        """Records that the running point was interrupted. After `MOST_CUTS` times it has failed."""
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
    """Returns `value` with floats that JSON cannot represent, such as nan, as text."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

"""Reads the GLUE download. Each task has a folder with train.tsv, dev.tsv and test.tsv:
tab-separated, unquoted.

MNLI has dev_matched.tsv, dev_mismatched.tsv, test_matched.tsv and test_mismatched.tsv. Test files
have no labels.
"""

import dataclasses
import math
import os
import pathlib
import warnings
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.config.glue_tasks import HIGHEST, LOWEST, TASKS, Task, TaskName
from experiments.errors import InputError

BOM = b"\xef\xbb\xbf"
LAYOUT = "the folder of the GLUE download, with a folder for each task"


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """N examples. `texts`: one or two texts in UTF-8 for each example. `labels`: classes, int32
    (N,), or scores, float32 (N,).
    """

    texts: Sequence[tuple[bytes, ...]]
    labels: np.ndarray | None  # None for a test file

    def __len__(self) -> int:
        return len(self.texts)


def read(path: str, name: TaskName, side: str) -> Examples:
    """Returns the examples of `path`/`name`/`side`.tsv. Raises InputError with file and line if
    the file is no GLUE file.

    Columns are found by their names; other columns are ignored.
    """
    task, labelled = TASKS[name], not side.startswith("test")
    file = _file(pathlib.Path(path), name, side)
    lines = _lines(file)
    header = task.columns if labelled and task.columns else _header(file, lines)
    texts = [_column(file, header, column) for column in task.texts]
    label = _column(file, header, task.label) if labelled else None
    found: list[tuple[bytes, ...]] = []
    labels: list[float] = []
    divided = 0
    for number, fields in lines:
        if task.divided and len(fields) < len(header):
            divided += 1
            continue
        if len(fields) != len(header):
            _refuse(
                file,
                number,
                f"{len(fields)} fields",
                f"{len(header)}, separated by tabs: {', '.join(header)}",
            )
        found.append(tuple(fields[i] for i in texts))
        if label is not None:
            labels.append(_label(file, number, fields[label], task))
    if divided:
        warnings.warn(f"{file}: left out {divided} lines that a line break divides", stacklevel=2)
    if not found:
        raise InputError(
            f"data.path: {file} has no examples; allowed: at least one row; get the file again"
        )
    return Examples(
        found, np.array(labels, np.int32 if task.labels else np.float32) if labelled else None
    )


def _file(path: pathlib.Path, name: str, side: str) -> pathlib.Path:
    if not os.path.isdir(path):
        raise InputError(f"data.path: got {str(path)!r}, which is no folder; allowed: {LAYOUT}")
    if not (path / name).is_dir():
        names = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir())) or "none"
        raise InputError(
            f"data.path: got {str(path)!r}, which has no folder {name}, but {names}; allowed:"
            f" {LAYOUT}"
        )
    return path / name / f"{side}.tsv"


def _lines(file: pathlib.Path) -> Iterator[tuple[int, list[bytes]]]:
    """Yields the number and the fields of each line that is not empty. Only newlines end a line: a
    text may contain Unicode's other line breaks.
    """
    try:
        content = file.read_bytes().removeprefix(BOM)
    except OSError as error:
        raise InputError(
            f"data.path: cannot read {file}: {error.strerror}; allowed: {LAYOUT}, which has this"
            " file"
        ) from error
    try:
        content.decode()
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        _refuse(
            file,
            number,
            f"the byte {content[error.start]:#04x}, which is not UTF-8",
            "UTF-8; convert the file",
        )
    for number, line in enumerate(content.split(b"\n"), 1):
        if line := line.removesuffix(b"\r"):
            yield number, line.split(b"\t")


def _header(file: pathlib.Path, lines: Iterator[tuple[int, list[bytes]]]) -> tuple[str, ...]:
    _, names = next(lines, (0, None))
    if names is None:
        raise InputError(
            f"data.path: {file} is empty; allowed: a row of names, then examples; get the file"
            " again"
        )
    return tuple(name.decode() for name in names)


def _column(file: pathlib.Path, header: Sequence[str], name: str) -> int:
    if header.count(name) != 1:
        _refuse(
            file,
            1,
            f"{header.count(name)} columns {name!r} among {', '.join(header)}",
            "1; get the file again",
        )
    return header.index(name)


def _label(file: pathlib.Path, number: int, field: bytes, task: Task) -> float:
    text = field.decode()
    if task.labels:
        if text not in task.labels:
            _refuse(file, number, f"{text!r} for {task.label}", f"one of {', '.join(task.labels)}")
        return task.labels.index(text)
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not LOWEST <= score <= HIGHEST:
        _refuse(
            file, number, f"{text!r} for {task.label}", f"a number from {LOWEST:g} to {HIGHEST:g}"
        )
    return score


def _refuse(file: pathlib.Path, number: int, got: str, allowed: str):
    raise InputError(f"data.path: {file}, line {number}: got {got}; allowed: {allowed}")

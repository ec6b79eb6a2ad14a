"""Reads text as bytes from Python's standard library, a file or a folder, and divides it into
training and validation text.
"""

import dataclasses
import hashlib
import os
import pathlib
import sysconfig

import numpy as np

from experiments.errors import InputError

VALIDATION = 0.07  # share of the files
NUL = b"\0"  # in no text, but in nearly all other files
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


@dataclasses.dataclass(frozen=True)
class Text:
    """`train` and `validation`: uint8, one dimension. `source`: a description of the data."""

    train: np.ndarray
    validation: np.ndarray
    source: str


def read(path: str | None, sequence: int) -> Text:
    """Returns the text of `path` (None: Python's standard library): at least `sequence` + 1 bytes
    for training, and as many for validation.
    """
    if path is None:
        folder = pathlib.Path(sysconfig.get_path("stdlib"))
        text = _folder(folder, f"Python's standard library ({folder})", "*.py")
    elif os.path.isdir(path):
        text = _folder(pathlib.Path(path), path, "*")
    else:
        text = _file(path)
    for side in ("train", "validation"):
        got = len(getattr(text, side))
        if got <= sequence:
            raise InputError(
                f"data.path: {text.source} is too short: got {got} bytes for {side}; allowed: at"
                f" least {sequence + 1},"
                f" one more than train.sequence"
            )
    return text


def in_validation(relative: str) -> bool:
    """Whether a file is for validation. A hash of its path within the folder decides, so that new
    files move no other file.
    """
    digest = hashlib.sha256(relative.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < VALIDATION * 2**64


def _folder(folder: pathlib.Path, source: str, pattern: str) -> Text:
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(folder.rglob(pattern)):
        relative = path.relative_to(folder)
        hidden = any(part in SKIPPED or part.startswith(".") for part in relative.parts)
        if hidden or not path.is_file():
            continue
        content = _bytes(path)
        if NUL not in content:
            sides[in_validation(relative.as_posix())].append(content)
    train, validation = (np.frombuffer(b"\n".join(side), np.uint8) for side in sides)
    return Text(train, validation, source)


def _file(path: str) -> Text:
    if not os.path.isfile(path):
        what = "is neither a file nor a folder" if os.path.exists(path) else "does not exist"
        raise InputError(
            f"data.path: got {path!r}, which {what}; allowed: a text file or a folder of them"
        )
    content = _bytes(pathlib.Path(path))
    if NUL in content:
        raise InputError(
            f"data.path: got {path!r}, which is no text: byte {content.index(NUL):,} of it is 0;"
            " allowed: a text file, such as UTF-8, or a folder of them"
        )
    everything = np.frombuffer(content, np.uint8)
    cut = len(everything) * 9 // 10
    return Text(everything[:cut], everything[cut:], path)


def _bytes(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"data.path: cannot read {path}: {error.strerror}") from error


def sample(
    text: np.ndarray, seed: int, step: int, batch: int, sequence: int, part: slice = slice(None)
) -> np.ndarray:
    """Returns batch number `step`, int32 (batch, sequence + 1), a function of the arguments; or the
    rows `part` of it, without reading the other rows.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - sequence, batch)[part]
    return text[starts[:, None] + np.arange(sequence + 1)].astype(np.int32)


def windows(text: np.ndarray, batches: int, batch: int, sequence: int) -> list[np.ndarray]:
    """Returns up to `batches` batches for evaluation, each int32 (batch, sequence + 1), spread
    evenly over `text`.
    """
    starts = (
        np.linspace(0, len(text) - sequence - 1, batches * batch)
        .astype(int)
        .reshape(batches, batch)
    )
    return [text[rows[:, None] + np.arange(sequence + 1)].astype(np.int32) for rows in starts]

"""Prints and writes the results of commands: text, JSON and files.

Planning takes minutes. So files are checked before it and written after it, and a result is shown
even if it cannot be written.
"""

import argparse
import json
import os
import pathlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmem._core.files import check_writable
from jaxmem.errors import JaxmemError

# An option, its path (None if it was left out), and a function that writes to a path.
Write = tuple[str, str | None, Callable[[str], Any]]


def check_outputs(
    outputs: Mapping[str, str | None], inputs: Mapping[str, str] | None = None
) -> None:
    """Raises JaxmemError unless every output can be written, and none is another or an input.

    outputs: option -> the path it was given, None where it was left out.
    inputs: path of a file that is read -> its name in errors, such as "the plan".
    """
    taken = dict(inputs or {})
    for option, path in outputs.items():
        if path is None:
            continue
        _check_path(option, path)
        for other, name in taken.items():
            if _same(path, other):
                raise JaxmemError(f"{option}: {path!r} is {name} too; name another file")
        taken[path] = f"the file of {option}"


def deliver(show: Callable[[], None], writes: Sequence[Write]) -> None:
    """Prints a result, then writes its files. The result is printed even if a file cannot be
    written, and the files are written even if nobody reads the output.

    show: prints the result.
    writes: the files. Each one is tried even if another fails.

    Raises JaxmemError, naming the files that could not be written.
    """
    try:
        show()
    finally:
        failed = []
        for option, path, write in writes:
            try:
                if path is not None:
                    write(path)
            except OSError as error:
                failed.append(f"{option}: {path!r} could not be written: {_why(error)}")
        if failed:
            raise JaxmemError(f"{'; '.join(failed)}; the result is printed above")


def say(text: str, stream=None, hang: str = "") -> None:
    """Prints text; on a terminal, lines break between words.

    text: one line or several.
    stream: the output stream. None means standard output.
    hang: the start of the further lines of a broken line, after its own indentation.
    """
    stream = stream or sys.stdout
    if stream.isatty():
        width = max(20, shutil.get_terminal_size().columns)
        text = "\n".join(_broken(line, width, hang) for line in text.split("\n"))
    print(text, file=stream, flush=True)


def _broken(line: str, width: int, hang: str) -> str:
    """A line broken at words to a width."""
    if len(line) <= width:
        return line
    start = line[: len(line) - len(line.lstrip())]
    lines = textwrap.wrap(
        line.strip(),
        width,
        initial_indent=start,
        subsequent_indent=start + hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def show_result(args: argparse.Namespace, data: Any, text: str | Callable[[], None]) -> None:
    """Prints the result of a command: as JSON with --json, otherwise as text.

    data: the result, as values of JSON.
    text: the text, or a function that prints it.
    """
    if args.json:
        print(json.dumps(data, indent=1), flush=True)
    elif isinstance(text, str):
        say(text)
    else:
        text()


def _check_path(option: str, path: str) -> None:
    """Raises JaxmemError unless a regular file can be written at `path`."""
    file = pathlib.Path(path)
    try:
        if file.is_dir():
            raise JaxmemError(f"{option}: {path!r} is a folder; expected the name of a file")
        if file.exists() and not file.is_file():  # a pipe, or a device such as /dev/stdout
            raise JaxmemError(f"{option}: {path!r} is no regular file; expected the name of one")
        check_writable(file)
    except OSError as error:
        raise JaxmemError(f"{option}: {path!r} cannot be written: {_why(error)}") from error


def _why(error: OSError) -> str:
    """The reason without the path, which may be the path of a temporary file of ours."""
    return error.strerror or str(error)


def _same(one: str, other: str) -> bool:
    """Whether two paths, however they are spelled, are one file."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there yet
        return False

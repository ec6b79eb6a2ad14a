"""Runs command lines in this process."""

import io
import pathlib
import shlex

from jaxmem.cli import main


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(line: str) -> int:
    """Returns the exit code of `jaxmem LINE`, split as by a shell."""
    try:
        return main(shlex.split(line))
    except SystemExit as stop:
        return stop.code


def listing(folder: pathlib.Path) -> dict[str, bytes | None]:
    """Returns all paths in a folder, with the contents of files."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}

"""Command lines run in this process."""

import pathlib
import shlex

from jaxmem.cli import main


def run(line: str) -> int:
    """The exit code of `jaxmem LINE`, read as a shell would."""
    try:
        return main(shlex.split(line))
    except SystemExit as stop:
        return stop.code


def listing(folder: pathlib.Path) -> dict[str, bytes | None]:
    """Everything below a folder, with what the files hold."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}

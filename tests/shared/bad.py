"""Files that must be refused: their type, errors that any text file may have, and a check of a
command's answer.
"""

import contextlib
import io
import pathlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import jax


class Bad(NamedTuple):
    """A file that must be refused.

    kind: the kind of error.
    content: the content of the file.
    key: the word that the message must name in addition to the file.
    """

    kind: str
    content: bytes
    key: str = ""


def unreadable(text: str) -> list[Bad]:
    """Returns valid text with errors in its bytes."""
    data, found = text.encode(), []
    for at in range(0, len(data), max(1, len(data) // 7)):
        found.append(Bad("not UTF-8", data[:at] + b"\xff" + data[at:]))
        found.append(Bad("not UTF-8", data[:at] + b"\xc0\x80" + data[at:]))  # NUL, too long
        found.append(Bad("a NUL", data[:at] + b"\0" + data[at:]))
    found.append(Bad("not UTF-8", text.encode("utf-16")))
    found.append(Bad("not UTF-8", text.encode("utf-32-be")))
    found.append(Bad("no text", b"\x7fELF\x02\x01" + bytes(range(256))))
    found.append(Bad("no text", b"\x1f\x8b\x08" + bytes(reversed(range(256)))))
    return found


def no_files(folder: pathlib.Path, ending: str) -> dict[str, str]:
    """Makes paths in `folder` that cannot be read as files; returns them by kind."""
    paths = {
        name: folder / f"{name.replace(' ', '_')}{ending}"
        for name in ("nothing", "a folder", "a link to nothing", "a link to itself", "no memory")
    }
    paths["a folder"].mkdir()
    paths["a link to nothing"].symlink_to(folder / "absent")
    paths["a link to itself"].symlink_to(paths["a link to itself"])
    paths["no memory"].symlink_to("/proc/self/mem")  # every read of its beginning fails
    (folder / "file").write_text("")
    paths["below a file"] = folder / "file" / f"a{ending}"
    paths["a long name"] = folder / f"{'x' * 300}{ending}"
    paths["a NUL"] = folder / f"a\0b{ending}"
    return {name: str(path) for name, path in paths.items()}


def refusal(bad: Bad, main: Callable, line: Sequence[str], file: str) -> list[str]:
    """Writes a bad file, and returns the errors in a command's refusal of the file: `mistakes`."""
    pathlib.Path(file).write_bytes(bad.content)
    return mistakes(main, line, file, bad.key)


def mistakes(main: Callable[[Sequence[str]], int], line: Sequence[str], *named: str) -> list[str]:
    """Returns the errors in a command's refusal of its line. A correct refusal ends with exit code
    2 and a message that names all of `named`, compiles nothing, and writes no file here.
    """
    before, said, printed = _listing(), io.StringIO(), io.StringIO()
    apart = contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed)
    with nothing_compiled() as compiled, apart[0], apart[1]:
        try:
            code: object = main(line)
        except SystemExit as stop:  # of argparse
            code = stop.code
        except BaseException as error:
            code = repr(error)[:200]
    found = [] if code == 2 else [f"ended with {code}"]
    found += [f"names no {name}" for name in named if name not in said.getvalue()]
    found += ["a traceback"] if "Traceback" in said.getvalue() else []
    found += ["prints"] if printed.getvalue() else []
    found += [f"compiled: {compiled[0]}"] if compiled else []
    return found + ([] if _listing() == before else ["wrote"])


@contextlib.contextmanager
def nothing_compiled() -> Iterator[list[str]]:
    """Records lowerings and compiles of this process in a `with` block. Forbids new processes."""
    found: list[str] = []

    def hear(event: str, *_, **__) -> None:
        if "/compile/" in event and not event.endswith("trace_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        with mock.patch.object(subprocess, "Popen", side_effect=AssertionError("a process")):
            yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)


def _listing() -> set[tuple[str, int]]:
    """Returns the files in the current folder and its subfolders, by name and time."""
    here = pathlib.Path()
    return {(str(path), path.lstat().st_mtime_ns) for path in here.rglob("*")}

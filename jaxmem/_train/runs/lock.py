"""Locks a run's folder against other processes, and converts errors of files to RunError."""

import contextlib
import os
import pathlib
import socket
from collections.abc import Iterator

from jaxmem._core.warn import warn
from jaxmem.errors import RunError

LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Locks the folder against other processes. The operating system releases the lock when the
    process ends in any way. A file system without locks causes a warning.
    """
    # The process that holds the lock removes the lock's file at its end. A file that is locked here
    # may therefore have no name any more. It would not keep out the next run, so another is locked.
    lock = folder.absolute() / LOCK
    while True:
        with told(folder):
            file = lock.open("a+", encoding="utf-8")
        try:
            import fcntl  # not on Windows

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)  # it was opened to append, at its end
            holder = file.read().strip() or "it has just begun"
            file.close()
            raise RunError(
                f"record: another run is writing to {str(folder)!r} ({holder}); wait for it, or"
                " name another folder"
            ) from None
        except (OSError, ImportError) as error:  # some network file systems have no locks
            warn(
                f"record: {str(folder)!r} cannot be locked ({error}); do not write two runs there"
                " at once"
            )
        if _is(lock, file.fileno()):
            break
        file.close()  # the process that held the lock has removed its file
    try:
        with told(folder):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()
        file.close()


def _is(path: pathlib.Path, descriptor: int) -> bool:
    """Whether the open file still has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def told(folder: pathlib.Path) -> Iterator[None]:
    """Raises RunError, which names the folder, for an OSError of the statement."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"record: cannot write to {str(folder)!r}: {error}; expected a folder, or a path where"
            " one can be made and written to"
        ) from error

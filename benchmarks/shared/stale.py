"""Lists the results whose sources changed after they were measured, with the time to measure again.

    python -m benchmarks.shared.stale

A result's file records the commit that measured it; of an older result, the commit that last
changed the file is taken. The result is stale if a file that its script imports has other code now
(`sources.py`); comments and docstrings do not count. The comparison needs git's history.
"""

import pathlib
from typing import NamedTuple

from benchmarks.shared.sources import ROOT, Sources, git
from jaxmem._core.files import read_json

NO_HISTORY = "git does not know its commit"
NO_SCRIPT = "no script writes this result any more"
SHOWN = 4  # changed files


class Stale(NamedTuple):
    """changed: files. seconds: what a run took; None where the file does not say. note: why a
    result is not compared.
    """

    name: str
    changed: list[str]
    seconds: float | None
    note: str = ""


def written_by(root: pathlib.Path, path: pathlib.Path) -> str | None:
    """The commit that measured a result: the recorded one, or the last that changed the file. A
    shallow clone does not know the latter.
    """
    found = read_json(path)
    shallow = (git(root, "rev-parse", "--is-shallow-repository") or "").strip()
    if "commit" in found or shallow != "false":
        return found.get("commit")
    return (git(root, "log", "-1", "--format=%H", "--", str(path)) or "").strip() or None


def stale_one(sources: Sources, path: pathlib.Path) -> Stale | None:
    """A result that is stale, or cannot be compared; None if its sources have not changed."""
    name, seconds = path.stem, read_json(path).get("seconds")
    script, commit = sources.script_of(name), written_by(sources.root, path)
    if script is None:
        return Stale(name, [], seconds, NO_SCRIPT)
    changed = None if commit is None else sources.changed(script, commit)
    if changed is None:
        return Stale(name, [], seconds, NO_HISTORY)
    return Stale(name, changed, seconds) if changed else None


def stale_results(root: pathlib.Path = ROOT) -> list[Stale]:
    """The shortest run first; runs of unknown length last."""
    sources, paths = Sources(root), sorted((root / "benchmarks" / "results").glob("*.json"))
    found = [one for path in paths if (one := stale_one(sources, path)) is not None]
    return sorted(found, key=lambda one: (one.seconds is None, one.seconds))


def listed(found: list[Stale], results: int) -> str:
    """As text: a line for each, and the total."""
    time = lambda seconds: "unknown time" if seconds is None else f"{seconds / 60:.1f} min"
    files = lambda s: f"{len(s.changed)} files, such as {', '.join(s.changed[:SHOWN])}"
    lines = [f"{s.name}: {time(s.seconds)}; {s.note or files(s)}" for s in found]
    known = [s.seconds for s in found if s.seconds is not None]
    lines.append(
        f"{len(found)} of {results} results are stale or cannot be compared: {time(sum(known))} for"
        f" {len(known)}, unknown time for {len(found) - len(known)}"
    )
    if any(s.note == NO_HISTORY for s in found):
        lines.append("Run it in a clone with its history (git fetch --unshallow) to compare these.")
    return "\n".join(lines)


def main() -> None:
    results = len(list((ROOT / "benchmarks" / "results").glob("*.json")))
    print(listed(stale_results(), results))


if __name__ == "__main__":
    main()

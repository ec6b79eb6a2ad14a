"""Lists the results whose sources changed after they were measured, with the time to measure again.

    python -m benchmarks.shared.stale

A result's file records a hash of each room that its script imports (`sources.py`). The result is
stale if a hash differs today. Results that were written before hashes were recorded are compared by
git: with the last commit that changed the file. This comparison needs the whole history.
"""

import pathlib
from typing import NamedTuple

from benchmarks.shared.sources import ROOT, Sources, git, room_of
from jaxmem._core.files import read_json

NO_HISTORY = "no sources recorded, and no git history to compare with"
NO_SCRIPT = "no script writes this result any more"


class Stale(NamedTuple):
    """changed: rooms. seconds: what a run took; None where the file does not say. note: why a
    result is not compared.
    """

    name: str
    changed: list[str]
    seconds: float | None
    note: str = ""


def has_history(root: pathlib.Path) -> bool:
    """Whether git knows all commits: a shallow clone lacks the older commits."""
    return (git(root, "rev-parse", "--is-shallow-repository") or "").strip() == "false"


def written_by(root: pathlib.Path, path: pathlib.Path) -> str | None:
    """The commit that wrote a result: the recorded one, or the last that changed the file."""
    found = read_json(path)
    if "commit" in found or not has_history(root):
        return found.get("commit")
    return (git(root, "log", "-1", "--format=%H", "--", str(path)) or "").strip() or None


def stale_one(sources: Sources, path: pathlib.Path) -> Stale | None:
    """A result that is stale, or cannot be compared; None if its sources have not changed."""
    found = read_json(path)
    name, seconds = path.stem, found.get("seconds")
    if found.get("sources"):
        changed = [r for r, digest in found["sources"].items() if sources.digest(r) != digest]
        return Stale(name, changed, seconds) if changed else None
    if "sources" in found:
        return Stale(name, [], seconds, "parts are from a run that recorded no sources")
    script = sources.script_of(name)
    if script is None:
        return Stale(name, [], seconds, NO_SCRIPT)
    commit = written_by(sources.root, path)
    if commit is None:
        return Stale(name, [], seconds, NO_HISTORY)
    differ = git(sources.root, "diff", "--name-only", commit) or ""
    rooms = sources.rooms(script)
    changed = sorted({room_of(p) for p in differ.splitlines()}.intersection(rooms))
    return Stale(name, changed, seconds) if changed else None


def stale_results(root: pathlib.Path = ROOT) -> list[Stale]:
    """The shortest run first; runs of unknown length last."""
    sources, paths = Sources(root), sorted((root / "benchmarks" / "results").glob("*.json"))
    found = [one for path in paths if (one := stale_one(sources, path)) is not None]
    return sorted(found, key=lambda one: (one.seconds is None, one.seconds))


def listed(found: list[Stale], results: int) -> str:
    """As text: a line for each, and the total."""
    time = lambda seconds: "unknown time" if seconds is None else f"{seconds / 60:.1f} min"
    lines = [f"{s.name}: {time(s.seconds)}; {s.note or ', '.join(s.changed)}" for s in found]
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

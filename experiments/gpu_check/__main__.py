"""python -m experiments.gpu_check --out DIR [--part NAME ...] [--small]: measures a GPU part by
part into DIR.

For a machine with one GPU and no network. Each part writes DIR/NAME.json row by row and takes less
than --limit seconds. The same command resumes a stopped part. --small rehearses on a CPU. Exit
codes: 0; 1 if a point failed or is missing; 2 for input that cannot be used.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

from experiments.errors import BAD_INPUT, InputError, nearest
from experiments.gpu_check.results import Results
from experiments.gpu_check.runner import run_part
from experiments.gpu_check.settings import Settings

PARTS = {
    "ceilings": ("ceilings", None),
    "codecs": ("codecs", None),
    "correctness": ("correctness", None),
    "stack_117m": ("stack", "gpt_117m"),
    "adama_117m": ("adama", "gpt_117m"),
    "quality": ("quality", None),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m experiments.gpu_check", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="where each part's file goes")
    parser.add_argument(
        "--part",
        action="append",
        default=[],
        metavar="NAME",
        help=f"of {', '.join(PARTS)} (default: all)",
    )
    parser.add_argument("--small", action="store_true", help="rehearse at tiny sizes, on a CPU")
    parser.add_argument(
        "--data", metavar="FILE", help="text for the part quality (default: the standard library)"
    )
    parser.add_argument(
        "--cache", metavar="DIR", help="compiled programs and checkpoints (default: DIR/cache)"
    )
    parser.add_argument(
        "--limit", type=float, default=440.0, metavar="SECONDS", help="of a part (default: 440)"
    )
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    args = parser.parse_args(argv)
    try:
        chosen = _settings(args)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    whole = True
    for settings in chosen:
        try:
            results = run_part(settings, args.retry)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return BAD_INPUT
        print(_line(settings.part, results), flush=True)
        whole &= not (results.data["unfinished"] or results.data["failed"])
    return 0 if whole else 1


def check_folder(out: str) -> pathlib.Path:
    """Returns `out` as a path. Raises InputError if results cannot be written there. Creates
    nothing.
    """
    path = pathlib.Path(out)
    place = next(p for p in (path.absolute(), *path.absolute().parents) if os.path.exists(p))
    if not place.is_dir() or not os.access(place, os.W_OK):
        what = "cannot be written to" if place.is_dir() else "is a file"
        raise InputError(
            f"--out: got {out!r}, and {place} {what}; allowed: a folder, or a path where one can"
            " be made"
        )
    return path


def _settings(args: argparse.Namespace) -> list[Settings]:
    out = check_folder(args.out)
    for name in args.part:
        if name not in PARTS:
            raise InputError(
                f"--part: got {name!r}{nearest(name, PARTS)}; allowed: {', '.join(PARTS)}"
            )
    if args.data is not None and not pathlib.Path(args.data).is_file():
        raise InputError(f"--data: got {args.data!r}, which is no file; allowed: a text file")
    if not args.limit > 0:
        raise InputError(f"--limit: got {args.limit}; allowed: more than 0")
    cache = os.path.abspath(args.cache or out / "cache")
    data = args.data and os.path.abspath(args.data)
    return [
        Settings(
            name,
            f"experiments.gpu_check.parts.{module}",
            str(out / f"{name}.json"),
            cache,
            args.limit,
            args.small,
            model,
            data,
        )
        for name, (module, model) in PARTS.items()
        if name in (args.part or PARTS)
    ]


def _line(part: str, results: Results) -> str:
    data, rows = results.data, results.rows
    said = [f"{len(rows) - len(data['failed'])} measured"]
    said += (
        [f"{len(data['failed'])} failed ({', '.join(data['failed'])})"] if data["failed"] else []
    )
    said += (
        [f"{len(data['unfinished'])} missing: give the command again"] if data["unfinished"] else []
    )
    said += [data["problem"]] if data["problem"] else []
    return f"{part}: {'; '.join(said)}"


if __name__ == "__main__":
    sys.exit(main())

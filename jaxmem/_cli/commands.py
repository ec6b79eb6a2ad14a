"""What each command of `jaxmem` does, given its parsed line; each returns an exit code."""

import argparse
import dataclasses
import json
import pathlib

from jaxmem._core.actions import ALL, LOSSLESS
from jaxmem.errors import JaxmemError


def plan(args: argparse.Namespace) -> int:
    from jaxmem._cli.entry import load_entry
    from jaxmem._core.progress import progress
    from jaxmem._planner.plan import plan as make_plan
    from jaxmem._report.report import report as write_report

    for name in ("out", "report"):
        _check_writable(f"--{name}", getattr(args, name))
    build, arguments = load_entry(args.step)
    named = {"all": ALL, "lossless": LOSSLESS}
    actions = named.get(args.actions) or tuple(args.actions.split(","))
    with progress():
        made = make_plan(
            build,
            *arguments,
            budget=_size(args.budget),
            host_budget=_size(args.host_budget),
            target=args.target,
            actions=actions,
        )
    if args.out:
        made.save(args.out)
    if args.report:
        write_report(made, args.report)
    print(json.dumps(made.to_json(), indent=1) if args.json else made)
    return 0


def explain(args: argparse.Namespace) -> int:
    from jaxmem._cli.entry import load_entry
    from jaxmem._explain.explain import explain as make_explanation
    from jaxmem._plan.plan import Plan

    chosen = Plan.load(args.plan) if args.plan else None
    build, arguments = load_entry(args.step)
    target = args.target or (chosen.target if chosen else "local")
    found = make_explanation(build, *arguments, plan=chosen, target=target)
    print(json.dumps(dataclasses.asdict(found), indent=1) if args.json else found)
    return 0


def show(args: argparse.Namespace) -> int:
    from jaxmem._plan.plan import Plan

    found = Plan.load(args.plan)
    print(json.dumps(found.to_json(), indent=1) if args.json else found)
    return 0


def diff(args: argparse.Namespace) -> int:
    from jaxmem._plan.difference import difference
    from jaxmem._plan.plan import Plan

    print(difference(Plan.load(args.first), Plan.load(args.second)))
    return 0


def report(args: argparse.Namespace) -> int:
    from jaxmem._report.report import report_runs

    first = pathlib.Path(args.runs[0])
    out = (
        pathlib.Path(args.out)
        if args.out
        else (first if first.is_dir() else first.parent) / "report.html"
    )
    _check_writable("--out", out)
    print(report_runs(args.runs, out))
    return 0


def targets(args: argparse.Namespace) -> int:
    from jaxmem._device.gpus import GPUS
    from jaxmem._device.target import Target

    found = [Target.parse(name) for name in GPUS]
    if args.json:
        print(json.dumps([dataclasses.asdict(t) for t in found], indent=1))
        return 0
    print("name        usable GiB  memory TB/s  16-bit TFLOP/s  host link GB/s  times from")
    for t in found:
        source = "XLA's estimates" if t.gpu and t.gpu.priced else "a roofline"
        print(
            f"{t.name:11} {t.usable_bytes / 2**30:10.1f} {t.bandwidth / 1e12:12.2f}"
            f" {t.matmul_flops / 1e12:15.0f}"
            f" {t.link / 1e9:15.0f}  {source}"
        )
    print(
        "`name:N` means N of them on one host; `local` is the device at hand, where times are"
        " measured"
    )
    return 0


def calibrate(args: argparse.Namespace) -> int:
    from jaxmem._device.calibrate import calibrate as write_rates

    print(write_rates(args.folder, args.out))
    return 0


def doctor(args: argparse.Namespace) -> int:
    from jaxmem._cli.doctor import examine

    checks = examine()
    if args.json:
        print(json.dumps([dataclasses.asdict(c) for c in checks], indent=1))
    else:
        for c in checks:
            print(f"{c.level:4} {c.name}: {c.found}")
            if c.remedy is not None:
                print(f"     -> {c.remedy}")
    return 1 if any(c.level == "bad" for c in checks) else 0


def _size(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() else text


def _check_writable(option: str, path: str | pathlib.Path | None) -> None:
    """Before minutes of planning, not after."""
    if path is None:
        return
    path = pathlib.Path(path)
    if path.is_dir():
        raise JaxmemError(f"{option}: {str(path)!r} is a folder; expected the name of a file")
    parent = next(p for p in path.absolute().parents if p.exists())
    if not parent.is_dir():
        raise JaxmemError(
            f"{option}: {str(path)!r}: {str(parent)!r} is no folder; expected a path where a file"
            " can be"
        )

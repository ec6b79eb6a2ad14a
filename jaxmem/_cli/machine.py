"""`jaxmem targets`, `calibrate`, `doctor`, `cache`: the commands about devices and this machine.
Each function runs one command, and returns its exit code.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

from jaxmem._cli.output import check_outputs, say, show_result
from jaxmem._core import database
from jaxmem._core.bytes import show_bytes
from jaxmem._target.devices.calibrate import calibrate as write_rates
from jaxmem._target.devices.chips import CHIPS
from jaxmem._target.devices.target import Target


def targets(args: argparse.Namespace) -> None:
    found = [Target.parse(name) for name in CHIPS]
    show_result(args, [dataclasses.asdict(t) for t in found], lambda: _table(found))


def _table(found: Sequence[Target]) -> None:
    """Prints the table of devices."""
    print("name       usable GiB  memory TB/s  16-bit TFLOP/s  link GB/s  times from")
    for t in found:
        source = CHIPS[t.name].time_source
        print(
            f"{t.name:9} {t.usable_bytes / 2**30:11.1f} {t.bandwidth / 1e12:12.2f}"
            f" {t.matmul_flops / 1e12:15.0f} {t.link / 1e9:10.0f}  {source}"
        )
    say(
        "link: to host memory, each way. `name:N` means N GPUs of one host, `name:NxH` N on each of"
        " H hosts; of a TPU it means a slice of N chips, and `name:4x4` or `name:4x4x4` one of so"
        " many along each axis. Every number is one device's: a chip of v2, v3 and tpu7x is two"
        " devices. `local` is the device at hand, where times are measured"
    )


def calibrate(args: argparse.Namespace) -> None:
    source = str(pathlib.Path(args.folder, "ceilings.json"))
    check_outputs({"--out": args.out}, {source: "what the check measured"})
    print(write_rates(args.folder, args.out))


def doctor(args: argparse.Namespace) -> int:
    from jaxmem._cli.doctor import examine  # imports JAX

    checks = examine()

    def lines() -> None:
        for c in checks:
            say(f"{c.level:4} {c.name}: {c.found}", hang=" " * 5)
            if c.remedy is not None:
                say(f"     -> {c.remedy}", hang=" " * 3)

    show_result(args, [dataclasses.asdict(c) for c in checks], lines)
    return 1 if any(c.level == "bad" for c in checks) else 0


def cache(args: argparse.Namespace) -> None:
    if args.clear:
        path, freed = database.default_path(), database.clear()
        data = {"path": str(path), "freed_bytes": freed}
        show_result(args, data, f"{path}: {show_bytes(freed)} freed")
        return
    path, (size, rows), fault = database.default_path(), database.usage(), database.check()
    data = {"path": str(path), "bytes": size, "rows": rows, "fault": fault}
    show_result(args, data, f"{path}: {fault or f'{show_bytes(size)}, {database.counted(rows)}'}")

"""Turns the results of a check on a GPU or TPU into the package's data, so that its measured rates
take the place of its datasheet's.
"""

import dataclasses
import os
import pathlib

from jaxmem._core.files import read_json, write_json
from jaxmem._core.reader import is_number
from jaxmem._target.devices.chips import CHIPS, chip_of_kind
from jaxmem._target.devices.rates import MEASURED, NAMES, WAYS
from jaxmem._target.devices.rates import datasheet as rates_by_datasheet
from jaxmem.errors import TargetError

# Each rate that a target needs, and the points of the check's `ceilings.json` that measure it. Of
# several points the slowest counts.
POINTS = {
    "bandwidth": ("copy",),
    "flops_16bit": ("matmul_bfloat16",),
    "flops_f32": ("matmul_float32",),
    "link": ("link_to_host", "link_to_device"),
    "codec": ("codec_encode", "codec_decode"),
} | {way: (way,) for way in WAYS}
PLAUSIBLE = 0.05, 1.2  # of the datasheet's: outside of this something else was measured


def calibrate(folder: str | os.PathLike, out: str | os.PathLike | None = None) -> str:
    """Reads the rates that a check measured on a device, and writes them as JSON. Returns a table
    of the measured rates and the rates expected by the datasheet, in B/s and FLOP/s.

    folder: where `python -m experiments.gpu_check --part ceilings` left its results.
    out: a file; None means the package's own data, where targets of that name find the rates from
      then on.

    Raises TargetError for results that are broken, a rehearsal's, of a device that is not in the
    table, or implausible.
    """
    path = pathlib.Path(folder) / "ceilings.json"
    data = _read(path)
    if data.get("small"):
        raise TargetError(
            f"calibrate: {str(path)!r} is a rehearsal at tiny sizes; expected the check run without"
            " --small"
        )
    kind = data.get("device")
    chip = chip_of_kind(kind) if isinstance(kind, str) else None
    if chip is None:
        raise TargetError(
            f"calibrate: {str(path)!r} is of device {kind!r}; expected one of {', '.join(CHIPS)}:"
            " add it to jaxmem/_target/devices/gpus.toml or tpus.toml"
        )
    sheet = rates_by_datasheet(chip)
    datasheet = dataclasses.asdict(sheet) | dict.fromkeys(WAYS, sheet.link)
    names = (*NAMES, *WAYS)
    measured = {name: min(_rate(data, point, path) for point in POINTS[name]) for name in names}
    for name, rate in measured.items():
        low, high = PLAUSIBLE
        if not low * datasheet[name] <= rate <= high * datasheet[name]:
            raise TargetError(
                f"calibrate: {str(path)!r}: `{name}` is {rate:.4g}, and {chip.name}"
                f" is expected to reach {datasheet[name]:.4g} by its datasheet;"
                f" expected {low:.0%} to {high:.0%} of it: measure again on an idle device"
            )
    target = pathlib.Path(out) if out is not None else MEASURED / f"{chip.name}.json"
    origin = {k: data.get(k) for k in ("device", "versions", "command")}
    made = {"chip": chip.name} | measured | origin
    try:
        write_json(target, made)
    except OSError as error:
        raise TargetError(
            f"calibrate: cannot write {str(target)!r}: {error}; name another file with --out"
        ) from error
    lines = (
        f"  {name:14} {rate:.4g}  {datasheet[name]:.4g}  {rate / datasheet[name]:.1%}"
        for name, rate in measured.items()
    )
    head = f"{chip.name}: measured, expected by the datasheet, share"
    return "\n".join([head, *lines, f"written to {target}"])


def _read(path: pathlib.Path) -> dict:
    """The check's results. Raises TargetError if they cannot be read, or have no `rows`."""
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise TargetError(
            f"calibrate: cannot read {str(path)!r}: {error}; expected what"
            " `python -m experiments.gpu_check --out DIR --part ceilings` writes"
        ) from error
    if not isinstance(data, dict) or not isinstance(data.get("rows"), dict):
        raise TargetError(f"calibrate: {str(path)!r} has no `rows`; expected the check's own file")
    return data


def _rate(data: dict, point: str, path: pathlib.Path) -> float:
    """The median rate of one point, in B/s or FLOP/s. Raises TargetError if it is none."""
    row = data["rows"].get(point)
    rate = row.get("rate") if isinstance(row, dict) else None
    value = rate.get("median") if isinstance(rate, dict) else None
    if not (is_number(value) and value > 0):
        raise TargetError(
            f"calibrate: {str(path)!r}: `rows.{point}.rate.median` is {value!r}; expected a rate"
            " above 0: measure that point again (--part ceilings --retry)"
        )
    return float(value)

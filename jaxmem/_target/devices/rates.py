"""Gives a device's rates: measured ones where a check has left them (`measured/NAME.json`), else
its datasheet's.
"""

import dataclasses
import json
import pathlib
from typing import Any

from jaxmem._target.devices.chips import Chip

LINK_EFFICIENCY = 0.8  # of the PCIe line's rate: about what pinned copies reach
CODEC_EFFICIENCY = 0.8  # of the memory's: what codecs' kernels are written for; not measured
MEASURED = pathlib.Path(__file__).parent / "measured"


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates of one device.

    bandwidth: of its memory, B/s.
    flops_16bit: of float16 and bfloat16 matrix products with float32 sums, FLOP/s.
    flops_f32: of float32 matrix products as XLA runs them by default, FLOP/s.
    link: of the host link, B/s, the slower of both directions.
    codec: of codecs' kernels, B/s that they read and write together.
    """

    bandwidth: float
    flops_16bit: float
    flops_f32: float
    link: float
    codec: float


NAMES = tuple(f.name for f in dataclasses.fields(Rates))
# The host link's rates to the device and to the host, B/s. Files of older checks lack them.
WAYS = "link_to_device", "link_to_host"


def datasheet(chip: Chip) -> Rates:
    """Returns the rates by the chip's datasheet, with estimates for copies and codecs."""
    link, codec = LINK_EFFICIENCY * chip.pcie, CODEC_EFFICIENCY * chip.bandwidth
    products = chip.product_efficiency
    flops = products * chip.flops_16bit, products * chip.flops_f32
    return Rates(chip.bandwidth, *flops, link, codec)


def rates_of(chip: Chip) -> Rates:
    """Returns the rates that plans for this chip are priced by."""
    found = _measured(chip)
    return Rates(*(float(found[name]) for name in NAMES)) if found else datasheet(chip)


def link_ways(chip: Chip) -> tuple[float, float] | None:
    """Returns the host link's rates to the device and to the host, None where no check measured
    both.
    """
    found = _measured(chip)
    there, back = (found.get(way) for way in WAYS)
    return None if there is None or back is None else (float(there), float(back))


def _measured(chip: Chip) -> dict[str, Any]:
    """What a check left, empty where none did."""
    path = MEASURED / f"{chip.name}.json"
    return json.loads(path.read_text()) if path.exists() else {}

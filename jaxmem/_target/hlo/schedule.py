"""Replays the schedule of an optimized GPU module: how long its kernels wait for transfers.

Transfers of one lane (between devices, to host memory, to the device) run one after the other, at
the same time as other lanes and as the kernels. The module lists instructions in the order in which
they run, so that a kernel between a transfer's start and its end hides as much of the transfer as
the kernel takes. The alternative for host memory was to let all work of a layer hide a layer's
transfers. An H200 then ran offloading steps up to 1.76 times as long as predicted: XLA waits for a
transfer after one matrix product, since it assumes that the transfer takes no time.
"""

import math
from collections.abc import Sequence

from jaxmem._target.hlo.links import Links
from jaxmem._target.hlo.text import HloModule, Instruction
from jaxmem._target.hlo.transfers import host_transfer

Lane = tuple[str, float]  # of a transfer: its lane, and its seconds


def between_devices(i: Instruction, module: HloModule, links: Links | None) -> Lane | None:
    """The collective that an instruction is, or starts."""
    seconds = links.crossing(module, i) if links else 0.0
    return ("devices", seconds) if seconds else None


def with_host(i: Instruction, module: HloModule, link: float) -> Lane | None:
    """The transfer between device and host memory that an instruction is, or starts.

    link: the rate of the host link, B/s each way.
    """
    if (found := host_transfer(i, module)) is None:
        return None
    return "to host" if found.to_host else "to device", found.nbytes / link


def waited(
    body: Sequence[Instruction], kernels: Sequence[float | None], lanes: Sequence[Lane | None]
) -> float:
    """Seconds in which the kernels of a computation wait for transfers.

    kernels: the seconds of each instruction without its transfer.
    lanes: the transfer of each instruction.
    """
    now = 0.0
    free: dict[str, float] = {}  # when the last transfer of a lane ends
    ends: dict[str, float] = {}  # when a transfer ends, by the instruction that starts it
    for i, seconds, lane in zip(body, kernels, lanes):
        if i.opcode.endswith("-done"):
            now = max(now, *(ends.pop(name, 0.0) for name in i.operand_names), 0.0)
        elif lane is not None:
            name, length = lane
            free[name] = max(now, free.get(name, 0.0)) + length
            if i.opcode.endswith("-start"):
                ends[i.name] = free[name]
            else:
                now = free[name]
        now += seconds or 0.0
    return now - math.fsum(s or 0.0 for s in kernels)

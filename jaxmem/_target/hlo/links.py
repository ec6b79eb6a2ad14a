"""Estimates the seconds of an optimized GPU module's transfers between devices.

XLA writes no estimate of a collective into a module for a GPU. So each collective is priced as a
ring over its group of devices, by the rate of the links that the group uses. A group inside a host
uses the links between the host's GPUs. A group over several hosts also uses the network: of its
devices in one host, each has a share.

The latency of a collective is not known, and not counted. `schedule.py` counts what kernels hide.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from jaxmem._target.hlo.collectives import CROSSING, crossed_bytes, is_collective, kind_of
from jaxmem._target.hlo.text import HloModule, Instruction

# replica_groups={{0,1},{2,3}}, replica_groups=[2,8]<=[4,4]T(1,0), and
# replica_groups=mesh['data'=2,'fsdp'=8] {'fsdp'}
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_AXIS = re.compile(r"'(\w+)'=(\d+)")
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")


@dataclasses.dataclass(frozen=True)
class Links:
    """The links between the devices of a target.

    devices: the number of devices.
    each: the number of devices of one host.
    peers: the rate of one device to the devices of its host, B/s each way.
    network: the rate of one device's share of the network between hosts, B/s each way.
    """

    devices: int
    each: int
    peers: float
    network: float

    def seconds(self, i: Instruction) -> float:
        """The seconds of a collective, if it runs alone."""
        kind = kind_of(i)
        size = crossed_bytes(i)
        if kind == "collective-permute":
            return size / self._rate(self._pair(i))
        group = self._group(i)
        share = (len(group) - 1) / len(group)
        return CROSSING[kind] * share * size / self._rate(group)

    def crossing(self, module: HloModule, i: Instruction) -> float:
        """The seconds of the collectives that an instruction is, or starts."""
        if i.opcode.endswith("-done"):
            return 0.0
        if is_collective(i):
            return self.seconds(i)
        if i.opcode != "async-start":
            return 0.0
        return math.fsum(self.seconds(j) for j in module.within(i) if is_collective(j))

    def _rate(self, group: Sequence[int]) -> float:
        """The rate of a ring over a group of devices, given by their numbers."""
        hosts = [device // self.each for device in group]
        if len(set(hosts)) == 1:
            return self.peers
        return min(self.peers, self.network * hosts.count(hosts[0]))

    def _group(self, i: Instruction) -> list[int]:
        """The devices of a collective's first group; all devices if the text names no group."""
        numbers = lambda text: [int(n) for n in text.split(",") if n]
        if found := _LISTED.search(i.text):
            return numbers(found[1])
        if found := _COUNTED.search(i.text):
            groups, shape = numbers(found[1]), numbers(found[2])
            devices = np.arange(math.prod(shape)).reshape(shape)
            devices = devices.transpose(numbers(found[3])) if found[3] else devices
            return devices.reshape(groups[0], -1)[0].tolist()
        if (found := _NAMED.search(i.text)) and ":" not in found[0]:
            axes = [(name, int(size)) for name, size in _AXIS.findall(found[1])]
            devices = np.arange(math.prod(size for _, size in axes))
            devices = devices.reshape([size for _, size in axes])
            named = re.findall(r"'(\w+)'", found[2])
            first = tuple(slice(None) if name in named else 0 for name, _ in axes)
            return devices[first].reshape(-1).tolist()
        return list(range(self.devices))

    def _pair(self, i: Instruction) -> list[int]:
        """Two devices between which a permute sends: devices of two hosts, if it sends between
        hosts.
        """
        found = _PAIRS.search(i.text)
        pairs = [[int(a), int(b)] for a, b in re.findall(r"(\d+),(\d+)", found[1])] if found else []
        between = [pair for pair in pairs if pair[0] // self.each != pair[1] // self.each]
        return next(iter(between or pairs), [0])

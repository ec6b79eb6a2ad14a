"""A profile whose layers are divided into groups that a plan decides apart. Free of JAX."""

import dataclasses
from collections.abc import Iterable

from jaxmem._core.labels import group_label, ranges
from jaxmem._core.profile import BlockClass, Profile


def divisible(profile: Profile) -> BlockClass | None:
    """The block whose layers a plan may divide: of those that `jaxmem.stack` loops over, the one
    that can save most.
    """
    labels = [b.name for b in profile.blocks]
    stacked = [
        b for b in profile.blocks if b.stacked and b.layers > 1 and labels.count(b.name) == 1
    ]
    return max(stacked, key=lambda b: b.layers * b.everything_bytes, default=None)


def divided(profile: Profile, block: BlockClass, at: int) -> Profile:
    """The same step with `block` as two, of its first `at` layers and of the others."""
    labels = [group_label(block.name, 0, at), group_label(block.name, at, block.layers)]
    return dataclasses.replace(profile, blocks=as_decided(profile.blocks, labels))


def as_decided(blocks: Iterable[BlockClass], labels: Iterable[str]) -> tuple[BlockClass, ...]:
    """The blocks, divided into the groups of layers that a plan's labels name."""
    labels = list(labels)
    parts = ([_part(b, *r) for r in ranges(labels, b.name)] or [b] for b in blocks)
    return tuple(part for several in parts for part in several)


def _part(block: BlockClass, start: int, stop: int) -> BlockClass:
    runs, layers = block.runs * (stop - start) // block.layers, stop - start
    return dataclasses.replace(
        block, name=group_label(block.name, start, stop), layers=layers, runs=runs
    )

"""Divides a block of a profile into groups of layers that a plan decides separately.

A group of layers is a block under a label such as `block[0:6]`, and a divided profile is a profile.
So the solver, the evaluation of costs, tables and files know nothing of groups.
"""

import dataclasses
from collections.abc import Iterable

from jaxmem._core.labels import group_label, ranges
from jaxmem._core.profile import BlockClass, Profile


def divisible(profile: Profile) -> list[BlockClass]:
    """The blocks whose layers a plan may divide, as those of `jaxmem.stack` and `jaxmem.auto`: the
    one that saves the most bytes with everything kept comes first.

    A label that several blocks share is left out: a group's label would not tell which it divides.
    """
    labels = [b.name for b in profile.blocks]
    found = [b for b in profile.blocks if b.divisible > 1 and labels.count(b.name) == 1]
    return sorted(found, key=lambda b: b.layers * b.everything_bytes, reverse=True)


def divided(profile: Profile, block: BlockClass, at: int) -> Profile:
    """The same step with `block` in two parts: its first `at` layers, and the others."""
    labels = [group_label(block.name, 0, at), group_label(block.name, at, block.divisible)]
    return dataclasses.replace(profile, blocks=as_decided(profile.blocks, labels))


def as_decided(blocks: Iterable[BlockClass], labels: Iterable[str]) -> tuple[BlockClass, ...]:
    """The blocks, each divided into the groups of layers that `labels` name, if they name any."""
    labels = list(labels)
    parts = ([_part(b, *r) for r in ranges(labels, b.name)] or [b] for b in blocks)
    return tuple(part for several in parts for part in several)


def _part(block: BlockClass, start: int, stop: int) -> BlockClass:
    """Layers `start` up to `stop` as a block. What is counted per layer stays; the runs in a step
    are shared out by the number of layers.
    """
    count = stop - start
    runs, layers = (n * count // block.divisible for n in (block.runs, block.layers))
    return dataclasses.replace(
        block, name=group_label(block.name, start, stop), layers=layers, runs=runs
    )

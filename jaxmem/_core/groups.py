"""Labels of blocks and of groups of layers, and the division of a block into groups that a plan
decides separately. `block[0:6]` stands for the first six layers of `block`, and `auto` is the label
of the block that `jaxmem.auto` makes.

`block[0:96:8]` stands for 96 layers in spans of 8 layers, as a slice of Python with the step 8
names the layers 0, 8, 16, ... Only the inputs of these layers, which begin the spans, are saved
through the whole step. The backward of a span runs the span's layers forward again first.

A group of layers is a block under a label such as `block[0:6]`, and a divided profile is a profile.
So the solver, the evaluation of costs, tables and files know nothing of groups.
"""

import dataclasses
import re
from collections.abc import Iterable

from jaxmem._core.actions import Actions, is_whole
from jaxmem._core.profile import BlockClass, Profile


def divisible(profile: Profile) -> list[BlockClass]:
    """The blocks whose layers a plan may divide, such as the blocks of `jaxmem.stack` and
    `jaxmem.auto`. The block that saves the most bytes with everything kept comes first.

    A label that several blocks share is left out: the label of a group would be ambiguous.
    """
    labels = [b.name for b in profile.blocks]
    found = [b for b in profile.blocks if b.divisible > 1 and labels.count(b.name) == 1]
    return sorted(found, key=lambda b: b.layers * b.everything_bytes, reverse=True)


def divided(profile: Profile, block: BlockClass, at: int) -> Profile:
    """The same step with `block` in two parts: its first `at` layers, and the others."""
    labels = [group_label(block.name, 0, at), group_label(block.name, at, block.divisible)]
    return dataclasses.replace(profile, blocks=as_decided(profile.blocks, labels))


def spannable(profile: Profile) -> list[list[BlockClass]]:
    """The loops whose layers a plan may run in spans, each as the blocks that take turns in it. The
    order is the order of `divisible`.
    """
    able = [b for b in divisible(profile) if b.rerun_seconds is not None]
    loops = ([b, *(x for x in profile.blocks if x.loop == b.name)] for b in able if not b.loop)
    return [loop for loop in loops if all(b in able for b in loop)]


def in_spans(profile: Profile, loop: Iterable[BlockClass], span: int) -> Profile:
    """The same step with the blocks of a loop in spans of `span` layers."""
    labels = [group_label(b.name, 0, b.divisible, span) for b in loop]
    return dataclasses.replace(profile, blocks=as_decided(profile.blocks, labels))


def as_decided(blocks: Iterable[BlockClass], labels: Iterable[str]) -> tuple[BlockClass, ...]:
    """The blocks, each divided into the groups of layers that `labels` name, if they name any."""
    labels = list(labels)
    parts = ([_part(b, *r) for r in ranges(labels, b.name)] or [b] for b in blocks)
    return tuple(part for several in parts for part in several)


def _part(block: BlockClass, start: int, stop: int, span: int = 1) -> BlockClass:
    """Layers `start` up to `stop` as a block. Numbers per layer are unchanged. The runs in a step
    are divided in proportion to the layers.

    In spans, the tensors of the layers of one span are alive at the same time. The layers after the
    last whole span are saved as without spans, and do not run forward again. If several blocks take
    turns in a loop, the inputs of a span are the inputs of the block that begins the iterations.
    """
    count = stop - start
    runs, layers = (n * count // block.divisible for n in (block.runs, block.layers))
    part = dataclasses.replace(
        block, name=group_label(block.name, start, stop, span), layers=layers, runs=runs
    )
    if span == 1:
        return part
    spans = count // span
    again = runs * spans * span / count
    inputs = () if block.loop else block.inputs
    return dataclasses.replace(
        part,
        layers=layers * span // count,
        span_bytes=spans * sum(block.values[v] for v in inputs),
        span_seconds=again * (block.rerun_seconds or 0.0),
    )


LABEL = re.compile(r"(?P<block>.+)\[(?P<start>\d{1,9}):(?P<stop>\d{1,9})(?::(?P<span>\d{1,9}))?\]")

AUTO = "auto"


def auto_label(number: int) -> str:
    """The label of the `number`-th block that `jaxmem.auto` makes; the first is 1."""
    return AUTO if number == 1 else f"{AUTO}_{number}"


def is_auto(label: str) -> bool:
    """Whether `jaxmem.auto` makes such a label, of a block in which the user wrote no tag."""
    return re.fullmatch(rf"{AUTO}(_\d+)?", ungrouped(label)) is not None


def keeps_everything(actions: Actions) -> bool:
    """Whether every block is as it is without a checkpoint. Layers in spans are under one."""
    return bool(actions) and all(
        is_whole(tags) and span_of(label) == 1 for label, tags in actions.items()
    )


def group_label(block: str, start: int, stop: int, span: int = 1) -> str:
    """The label of layers `start` up to, and without, `stop`, in spans of `span` layers."""
    return f"{block}[{start}:{stop}]" if span == 1 else f"{block}[{start}:{stop}:{span}]"


def span_of(label: str) -> int:
    """The number of layers of a span of the layers that a label names; 1 for other labels."""
    match = LABEL.fullmatch(label)
    return int(match["span"]) if match and match["span"] else 1


def ungrouped(label: str) -> str:
    """The block that a label names: `block` for `block[0:6]`, and for `block` itself."""
    match = LABEL.fullmatch(label)
    return match["block"] if match else label


def ranges(labels: Iterable[str], block: str) -> tuple[tuple[int, ...], ...]:
    """The ranges of layers of one block among labels, in order: (start, stop), or (start, stop,
    span) for layers in spans.
    """
    matches = (LABEL.fullmatch(label) for label in labels)
    found = (m.groups()[1:] for m in matches if m and m["block"] == block)
    return tuple(sorted(tuple(int(n) for n in group if n is not None) for group in found))

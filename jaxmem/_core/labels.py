"""Labels of blocks: those that `jaxmem.auto` gives, and those of groups of layers. `block[0:6]`
stands for the first six layers of `block`.
"""

import re
from collections.abc import Iterable

LABEL = re.compile(r"(?P<block>.+)\[(?P<start>\d+):(?P<stop>\d+)\]")

AUTO = "auto"


def auto_label(number: int) -> str:
    """The label of the `number`-th block that `jaxmem.auto` makes; the first is 1."""
    return AUTO if number == 1 else f"{AUTO}_{number}"


def is_auto(label: str) -> bool:
    """Whether `jaxmem.auto` would give such a label: who passed the model on wrote no tag of it."""
    return re.fullmatch(rf"{AUTO}(_\d+)?", ungrouped(label)) is not None


def group_label(block: str, start: int, stop: int) -> str:
    """The label of layers `start` up to, and without, `stop`."""
    return f"{block}[{start}:{stop}]"


def ungrouped(label: str) -> str:
    """The block that a label is about: `block` for `block[0:6]`, and for `block` itself."""
    match = LABEL.fullmatch(label)
    return match["block"] if match else label


def ranges(labels: Iterable[str], block: str) -> tuple[tuple[int, int], ...]:
    """The ranges of layers of one block among labels, in order."""
    matches = (LABEL.fullmatch(label) for label in labels)
    found = (m for m in matches if m and m["block"] == block)
    return tuple(sorted((int(m["start"]), int(m["stop"])) for m in found))

"""Shows the action of each tensor of a plan: in a strip of layers, in a grid of tensors against
plans, and in a table with the reasons.
"""

from collections.abc import Iterable, Sequence

from jaxmem._core.actions import UNTAGGED, Action, Actions, Choice, choice_of, is_whole
from jaxmem._core.bytes import show_bytes
from jaxmem._core.groups import LABEL, ungrouped
from jaxmem._result import svg
from jaxmem._result.action_styles import LOOKS
from jaxmem._result.plan.plan import AS_WRITTEN, Plan
from jaxmem._result.plan.rows import Row
from jaxmem._train.runs.run import Run

CELLS = 48  # at most, in a tensor's strip of layers; where there are more layers they share cells


def _word(action: Action) -> str:
    """An action as the page writes it."""
    return action.value.replace("_", "+")


def _chip(action: Action) -> str:
    """The square of an action: its colour, its pattern and its letter."""
    return svg.element("span", svg.element("b", LOOKS[action].letter), css=f"chip a-{action.value}")


def _actions() -> str:
    """A legend of the chips."""
    return svg.legend((_chip(a), f"{_word(a)}: {LOOKS[a].meaning}") for a in Action)


def strip_figure(plan: Plan) -> str:
    """A strip for each block, with a line for each tensor: its action over the layers, and its
    bytes in all layers before and after.
    """
    if plan.as_written and not plan.rows:
        return f"<p>{AS_WRITTEN[0].upper()}{AS_WRITTEN[1:]}.</p>"
    if not plan.rows:
        return "<p>The plan's file holds no table.</p>"
    blocks = list(dict.fromkeys(row.block for row in plan.rows))
    most = max(row.bytes_before * row.layers for row in plan.rows) or 1
    strips = ""
    for block in blocks:
        strips += f"<h4>block {svg.escape(block)}</h4>" if len(blocks) > 1 else ""
        strips += _strip([row for row in plan.rows if row.block == block], most)
    return strips + _actions()


def _strip(rows: Sequence[Row], most: int) -> str:
    """The figure of one block: a line for each tensor, and cells for the layers."""
    layers = max(row.layers for row in rows)
    each = -(-layers // CELLS)  # layers to a cell, rounded up
    cells = f"layers 1 to {layers}" if layers > 1 else "one layer"
    cells += f", {each} to a cell" if each > 1 else ""
    texts = {"name": "tensor", "cells": cells, "held": "bytes saved in all layers"}
    texts["sizes"] = "before → after"
    heads = (svg.element("span", text, css=css) for css, text in texts.items())
    head = svg.element("div", "<span></span>" + "".join(heads), css="tensor head")
    return svg.element("div", head + "".join(_tensor(row, most) for row in rows), css="strip")


def _tensor(row: Row, most: int) -> str:
    """The line of a tensor in a strip. `most` bytes fill the width for bytes."""
    action, sizes = row.choice.action, (row.bytes_before, row.bytes_after)
    before, after = (size * row.layers for size in sizes)
    each = " → ".join(map(show_bytes, sizes))
    said = f"{row.tag}: {row.choice}, {each} a layer"
    # as many cells as are filled by the layers that share one, which may be fewer than CELLS
    count = -(-row.layers // -(-row.layers // CELLS))
    cells = svg.box(0, 100, f"a-{action.value}") + svg.box(0, 100, f"t-{action.value}")
    cells += svg.separators(count) + svg.box(0, 100, "hover", said)
    held = svg.box(0, 100 * before / most, "before", f"before: {show_bytes(before)}")
    held += svg.box(0, 100 * after / most, f"a-{action.value}", f"after: {show_bytes(after)}")
    line = (
        _chip(action),
        svg.element("span", svg.escape(row.tag), css="name", title=row.tag),
        svg.element("svg", cells, css="cells", role="img", aria_label=said),
        svg.element("svg", held, css="held", aria_hidden="true"),
        svg.element("span", f"{show_bytes(before)} → {show_bytes(after)}", css="sizes"),
    )
    return svg.element("div", "".join(line), css="tensor")


def curve_grid(plan: Plan) -> str:
    """The actions of each plan of the curve by tensor; empty if the file has no actions. The plan
    with the most bytes within the budget is marked.
    """
    points = sorted(plan.points, key=lambda p: p.bytes)
    if not any(point.actions for point in points):
        return ""
    columns = [
        (f"{show_bytes(point.bytes)}<br>{svg.show_ms(1e3 * point.seconds)}", point.actions)
        for point in points
    ]
    tensors = dict.fromkeys((ungrouped(row.block), row.tag) for row in plan.rows)
    if not tensors:  # the step as written has no table
        tensors = dict.fromkeys(tensor for point in points for tensor in _tensors(point.actions))
    within = [i for i, point in enumerate(points) if point.bytes <= plan.budget_bytes]
    return _grid(columns, list(tensors), "bytes<br>step, predicted", within[-1:])


def runs_grid(runs: Sequence[Run]) -> str:
    """The actions of each run's plan by tensor; empty if fewer than two runs have a plan."""
    plans = [(run.name, run.plan) for run in runs if run.plan is not None]
    if len(plans) < 2:
        return ""
    tensors: dict[tuple[str, str], None] = {}
    for _, plan in plans:
        named = [(ungrouped(row.block), row.tag) for row in plan.rows if row.tag != UNTAGGED]
        tensors |= dict.fromkeys([*named, *_tensors(plan.actions)])
    columns = [
        (f"{svg.breakable(name)}<br>{show_bytes(plan.compiled_bytes)}", plan.actions)
        for name, plan in plans
    ]
    return _grid(columns, list(tensors), "compiled", []) + _actions()


def _tensors(actions: Actions) -> list[tuple[str, str]]:
    """The block and the tag of each tensor in the actions."""
    return [(ungrouped(b), tag) for b, tags in actions.items() for tag in tags if tag != UNTAGGED]


def _grid(
    columns: Sequence[tuple[str, Actions]],
    tensors: Sequence[tuple[str, str]],
    corner: str,
    marked: Sequence[int],
) -> str:
    """A row for each tensor, and a column for each plan: its head and its actions."""
    several = len({block for block, _ in tensors}) > 1
    heads, plans = zip(*columns)
    rows = (
        (
            svg.breakable(f"{block}/{tag}" if several else tag),
            *(_cell(actions, block, tag) for actions in plans),
        )
        for block, tag in tensors
    )
    inner = svg.named_rows([corner, *heads], rows, "plans", [1 + i for i in marked])
    return svg.element("div", inner, css="scroll", tabindex="0")


def _cell(actions: Actions, block: str, tag: str) -> str:
    """The chip of a tensor's action, or a chip for each group of layers if the actions differ."""
    found = list(_choices(actions, block, tag))
    if not found:
        return "–"
    if len({choice for _, choice in found}) == 1:
        found = [("", found[0][1])]
    return "".join(
        svg.element("span", _chip(choice.action), css="what", title=f"{where}{choice}")
        for where, choice in found
    )


def _choices(actions: Actions, block: str, tag: str) -> Iterable[tuple[str, Choice]]:
    """The choice of a tensor in each label of its block, with the label's layers in words. A tag
    that a label does not name is recomputed, or kept if the label keeps everything.
    """
    for label, tags in actions.items():
        if ungrouped(label) == block and (is_whole(tags) or tag in tags):
            match = LABEL.fullmatch(label)
            where = f"layers {int(match['start']) + 1} to {match['stop']}: " if match else ""
            yield where, choice_of(tags, tag)


def why(rows: Sequence[Row]) -> str:
    """The plan's table: the action of each tensor, its cost and the reason."""
    several = len({row.block for row in rows}) > 1
    head = ["tensor", "kind", "shape", "type", "action", "codec", "before", "after", "time", "why"]
    lines = []
    for row in rows:
        action = row.choice.action
        shape = " × ".join(map(str, row.shape)) or "scalar"
        codec = svg.escape(row.choice.codec or "–").replace("()", "")
        lines.append(
            [
                svg.breakable(f"{row.block}/{row.tag}" if several else row.tag),
                svg.escape(row.kind or "–"),
                svg.escape((f"{row.count} of " if row.count > 1 else "") + shape),
                svg.escape(row.dtype),
                svg.element("span", _chip(action) + svg.escape(_word(action)), css="action"),
                codec.replace("(", "<wbr>(").replace(",", ", "),
                show_bytes(row.bytes_before),
                show_bytes(row.bytes_after),
                svg.show_ms(row.milliseconds),
                svg.escape(row.why),
            ]
        )
    return svg.table(head, lines, "why") if rows else ""

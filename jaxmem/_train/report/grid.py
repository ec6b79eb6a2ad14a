"""Draws grids of tensors against plans: what becomes of each tensor at each budget, or in each
run.
"""

from collections.abc import Iterable, Sequence

from jaxmem._core.actions import KEEP, RECOMPUTE, REST, Action, Actions, Choice
from jaxmem._core.bytes import show_bytes
from jaxmem._core.labels import LABEL, ungrouped
from jaxmem._result.plan.plan import Plan
from jaxmem._train.report.bars import MEANINGS, chip
from jaxmem._train.report.svg import breakable, escape, legend, show_ms
from jaxmem._train.runs.read import Run

Tensor = tuple[str, str]  # a block and a tag


Column = tuple[str, Actions | None, bool]  # HTML, a plan's actions, whether it is set off


def curve_grid(plan: Plan) -> str:
    """What each plan of the curve does with each tensor; empty where the file does not say. The
    one that the budget allows, as predicted, is marked. The strip above says what letters mean.
    """
    points = sorted(plan.points, key=lambda p: p.bytes)
    if not any(point.actions for point in points):
        return ""
    within = [i for i, point in enumerate(points) if point.bytes <= plan.budget_bytes]
    columns = [
        (
            f"{show_bytes(point.bytes)}<br>{show_ms(1e3 * point.seconds)}",
            point.actions or None,
            within[-1:] == [i],
        )
        for i, point in enumerate(points)
    ]
    tensors = dict.fromkeys((ungrouped(row.block), row.tag) for row in plan.rows)
    if not tensors:  # the step as written, of which the plan has no table
        named = [(ungrouped(b), t) for p in points for b, tags in p.actions.items() for t in tags]
        tensors = dict.fromkeys(tensor for tensor in named if tensor[1] != REST)
    return _grid(columns, list(tensors), "bytes<br>step, predicted")


def runs_grid(runs: Sequence[Run]) -> str:
    """What each run's plan does with each tensor; empty where fewer than two runs have one."""
    plans = [(run.name, run.plan) for run in runs if run.plan is not None]
    if len(plans) < 2:
        return ""
    tensors: dict[Tensor, None] = {}
    for _, plan in plans:
        found = [(row.block, row.tag) for row in plan.rows]
        found += [(label, tag) for label, tags in plan.actions.items() for tag in tags]
        tensors |= dict.fromkeys((ungrouped(label), tag) for label, tag in found if tag != REST)
    columns = [
        (f"{breakable(name)}<br>{show_bytes(plan.compiled_bytes)}", plan.actions, False)
        for name, plan in plans
    ]
    key = legend((chip(a), f"{a.value.replace('_', '+')}: {MEANINGS[a]}") for a in Action)
    return _grid(columns, list(tensors), "compiled") + key


def _grid(columns: Sequence[Column], tensors: Sequence[Tensor], corner: str) -> str:
    several = len({block for block, _ in tensors}) > 1
    mark = lambda marked: ' class="marked"' if marked else ""
    heads = "".join(f'<th scope="col"{mark(m)}>{head}</th>' for head, _, m in columns)
    lines = []
    for block, tag in tensors:
        name = breakable(f"{block}/{tag}" if several else tag)
        cells = "".join(
            f"<td{mark(m)}>{_cell(actions, block, tag)}</td>" for _, actions, m in columns
        )
        lines.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    return (
        '<div class="scroll" tabindex="0"><table class="plans"><thead><tr>'
        f'<th scope="col">{corner}</th>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cell(actions: Actions | None, block: str, tag: str) -> str:
    """A chip for what becomes of a tensor, or one for each group of layers if they differ."""
    found = list(_choices(actions or {}, block, tag))
    if not found:
        return "–"
    if len({choice for _, choice in found}) == 1:
        found = [("", found[0][1])]
    return "".join(
        f'<span class="what" title="{escape(f"{where}{choice}")}">{chip(choice.action)}</span>'
        for where, choice in found
    )


def _choices(actions: Actions, block: str, tag: str) -> Iterable[tuple[str, Choice]]:
    """The choice for a tensor of each label of its block, and which layers that is about. A tag
    that a label does not name is recomputed, or kept where everything is.
    """
    for label, tags in actions.items():
        whole = tags.get(REST) == KEEP
        if ungrouped(label) == block and (whole or tag in tags):
            match = LABEL.fullmatch(label)
            where = f"layers {int(match['start']) + 1} to {match['stop']}: " if match else ""
            yield where, KEEP if whole else tags.get(tag, RECOMPUTE)

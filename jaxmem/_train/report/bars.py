"""Draws the page's bars: what holds the memory, and what the plan does with each tensor."""

from collections.abc import Sequence

from jaxmem._core.actions import Action
from jaxmem._core.bytes import show_bytes
from jaxmem._result.plan.plan import AS_WRITTEN, Plan
from jaxmem._result.plan.rows import Bytes, Row
from jaxmem._train.report.svg import box, breakable, escape, legend, separators, upright
from jaxmem._train.runs.read import Run

CELLS = 48  # at most, in a tensor's strip of layers; where there are more layers they share cells
LETTERS = {
    Action.KEEP: "K",
    Action.RECOMPUTE: "R",
    Action.COMPRESS: "C",
    Action.OFFLOAD: "O",
    Action.COMPRESS_OFFLOAD: "CO",
}
MEANINGS = {
    Action.KEEP: "stays in device memory",
    Action.RECOMPUTE: "made again in the backward",
    Action.COMPRESS: "held as codes on the device",
    Action.OFFLOAD: "waits in host memory",
    Action.COMPRESS_OFFLOAD: "waits in host memory as codes",
}
CLASSES = {
    "arguments": "arguments and model states",
    "saved": "saved for the backward",
    "working": "working memory",
}


def chip(action: Action) -> str:
    """The square that stands for an action: its colour, its pattern, its letter."""
    return f'<span class="chip a-{action.value}"><b>{LETTERS[action]}</b></span>'


def memory_figure(plan: Plan) -> str:
    """Bars on one scale with the budget: everything kept, the step as written where it has
    checkpoints of its own, the plan as compiled, and the plan as predicted. A table of all but the
    last, by what holds the bytes, stands below.
    """
    known = {"everything kept": (plan.baseline_bytes, plan.baseline_parts)}
    if plan.written is not None:
        known["as written"] = plan.written.bytes, plan.written.parts
    bars = [
        *((name, size, _classes(parts)) for name, (size, parts) in known.items()),
        ("plan, compiled", plan.compiled_bytes, _classes(plan.parts)),
        ("plan, predicted", plan.predicted_bytes, [("hollow", plan.predicted_bytes, "predicted")]),
    ]
    columns = {name: parts for name, (_, parts) in known.items()} | {"plan": plan.parts}
    sizes = lambda name: "".join(
        f"<td>{show_bytes(getattr(parts, name))}</td>" for parts in columns.values()
    )
    lines = [
        f'<tr><th scope="row"><i class="key block c-{name}"></i>{escape(text)}</th>'
        f"{sizes(name)}</tr>"
        for name, text in CLASSES.items()
    ]
    return _bars(bars, plan.budget_bytes) + (
        '<table class="small"><thead><tr><th scope="col">what holds it</th>'
        + "".join(f'<th scope="col">{name}</th>' for name in columns)
        + f"</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def runs_figure(runs: Sequence[Run]) -> str:
    """A bar of compiled bytes for each run, by what holds them where the run has a plan; nothing
    where no run has bytes.
    """
    bars = []
    for run in runs:
        if run.plan:
            bars.append((run.name, run.plan.compiled_bytes, _classes(run.plan.parts)))
        elif size := run.number("compiled_bytes"):
            bars.append((run.name, int(size), [("hollow", int(size), "compiled, without a plan")]))
    if not bars:
        return ""
    key = [(f'<i class="key block c-{name}"></i>', text) for name, text in CLASSES.items()]
    if any(run.plan is None for run in runs):
        key.append(('<i class="key block c-hollow"></i>', "not told apart: no plan"))
    return _bars(bars, None) + legend(key)


def strip_figure(plan: Plan) -> str:
    """A strip for each block, with a line for each tensor: its action over the layers, and the
    bytes that it holds in all of them before and after.
    """
    if plan.as_written and not plan.rows:
        return f"<p>{AS_WRITTEN[0].upper()}{AS_WRITTEN[1:]}.</p>"
    if not plan.rows:
        return "<p>The plan's file holds no table.</p>"
    blocks = list(dict.fromkeys(row.block for row in plan.rows))
    most = max(row.bytes_before * row.layers for row in plan.rows) or 1
    made = []
    for block in blocks:
        rows = [row for row in plan.rows if row.block == block]
        layers = max(row.layers for row in rows)
        each = -(-layers // CELLS)  # layers to a cell, rounded up
        axis_text = f"layers 1 to {layers}" if layers > 1 else "one layer"
        axis_text += f", {each} to a cell" if each > 1 else ""
        made.append(
            (f"<h4>block {escape(block)}</h4>" if len(blocks) > 1 else "")
            + '<div class="strip"><div class="tensor head"><span></span><span'
            ' class="name">tensor</span>'
            f'<span class="cells">{axis_text}</span><span class="held">bytes saved in all'
            " layers</span><span"
            ' class="sizes">before → after</span></div>'
            + "".join(_tensor(row, most) for row in rows)
            + "</div>"
        )
    return "".join(made) + legend(
        (chip(a), f"{a.value.replace('_', '+')}: {MEANINGS[a]}") for a in Action
    )


def _tensor(row: Row, most: int) -> str:
    """A tensor's line of a strip; `most` bytes are as wide as the place for bytes."""
    action, count = row.choice.action, min(CELLS, row.layers)
    before, after = row.bytes_before * row.layers, row.bytes_after * row.layers
    said = (
        f"{row.tag}: {row.choice}, {show_bytes(row.bytes_before)} → {show_bytes(row.bytes_after)} a"
        " layer"
    )
    # as many cells as are filled by the layers that share one, which may be fewer than CELLS
    cells = count if row.layers <= CELLS else -(-row.layers // -(-row.layers // CELLS))
    return (
        f'<div class="tensor">{chip(action)}<span class="name"'
        f' title="{escape(row.tag)}">{escape(row.tag)}</span>'
        '<svg class="cells" role="img"'
        f' aria-label="{escape(said)}">{box(0, 100, f"a-{action.value}")}'
        f"{box(0, 100, f't-{action.value}')}{separators(cells)}{box(0, 100, 'hover', said)}</svg>"
        '<svg class="held" aria-hidden="true">'
        f"{box(0, 100 * before / most, 'before', f'before: {show_bytes(before)}')}"
        f"{box(0, 100 * after / most, f'a-{action.value}', f'after: {show_bytes(after)}')}</svg>"
        f'<span class="sizes">{show_bytes(before)} → {show_bytes(after)}</span></div>'
    )


def _bars(bars: Sequence[tuple[str, int, list[tuple[str, int, str]]]], budget: int | None) -> str:
    """Draws bars on one scale, with a rule where the budget is.

    bars: for each its name, its bytes, and its parts as (CSS class, bytes, title).
    budget: in bytes; None draws no rule.
    """
    most = max(size for _, size, _ in bars) or 1
    # A budget far beyond every bar would squeeze them, and is told in words instead.
    near = budget is not None and budget <= 1.5 * most
    most = 1.02 * max(most, budget if near and budget else 0)
    at = 100 * budget / most if budget and near else 0
    rule = upright(at, "budget", "budget") if near else ""
    rows = []
    for name, size, parts in bars:
        left, marks = 0.0, ""
        for css, part, title in parts:
            marks += box(left, 100 * part / most, f"c-{css}", f"{title}: {show_bytes(part)}")
            left += 100 * part / most
        rows.append(
            f'<div class="bar"><span class="name">{breakable(name)}</span><svg class="sum"'
            ' role="img"'
            f' aria-label="{escape(name)}: {show_bytes(size)}"><svg class="body" y="5"'
            f' height="20">{marks}</svg>{rule}</svg>'
            f'<span class="sizes">{show_bytes(size)}</span></div>'
        )
    if budget is None:
        return f'<div class="bars many">{"".join(rows)}</div>'
    # The budget's text is anchored on the side of its rule where there is more room.
    said = f"budget {show_bytes(budget)}" + ("" if near else ", beyond the scale →")
    anchor, place = ("end", min(at, 100)) if at > 50 or not near else ("start", at)
    head = (
        f'<text class="tick {anchor}" x="{place if near else 100:.2f}%"'
        f' y="14">{escape(said)}</text>'
    )
    return (
        '<div class="bars"><div class="bar head"><span class="name"></span>'
        f'<svg class="sum">{head}</svg><span class="sizes"></span></div>{"".join(rows)}</div>'
    )


def _classes(parts: Bytes) -> list[tuple[str, int, str]]:
    """A compiled step's bytes as the parts of a bar."""
    return [(name, getattr(parts, name), text) for name, text in CLASSES.items()]

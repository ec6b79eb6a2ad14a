"""Shows the use of the memory: as bars on one scale with the budget, and as areas over the schedule
of the compiled step.
"""

import collections
from collections.abc import Mapping, Sequence

from jaxmem._core.actions import EVERYTHING_KEPT
from jaxmem._core.bytes import show_bytes
from jaxmem._result import svg
from jaxmem._result.memory.explanation import Explanation
from jaxmem._result.memory.live import Live
from jaxmem._result.plan.plan import Plan
from jaxmem._result.plan.rows import Bytes
from jaxmem._train.runs.run import Run

CLASSES = {
    "arguments": "arguments and model states",
    "saved": "saved for the backward",
    "working": "working memory",
}
TAGS = 6  # the largest tags, with a colour for each; the other tags share a colour
_KINDS = {  # from the bottom to the top; saved tags come after the first two
    "arguments": "arguments and model states",
    "outputs": "outputs beside the arguments",
    "untagged": "saved without a tag",
    "gradients": "gradients",
    "layer": "working memory of one layer",
    "outside": "outside the layers",
    "other": "outside the gradient",
}
_LABELLED = 0.17  # of the width that a phase takes at least for its name to stand below it
_Parts = list[tuple[str, int, str]]  # CSS class, bytes and title of each part of a bar
_Bands = dict[str, tuple[str, list[int]]]  # CSS class -> name, and bytes at each point


def memory_figure(plan: Plan) -> str:
    """Bars on one scale with the budget: everything kept, the step as written if it has checkpoints
    of its own, the compiled plan, and the predicted plan. A table below divides the compiled bytes
    by use.
    """
    known = {EVERYTHING_KEPT: (plan.baseline_bytes, plan.baseline_parts)}
    if plan.written is not None:
        known["as written"] = plan.written.bytes, plan.written.parts
    bars = [
        *((name, size, _classes(parts)) for name, (size, parts) in known.items()),
        ("plan, compiled", plan.compiled_bytes, _classes(plan.parts)),
        ("plan, predicted", plan.predicted_bytes, [("hollow", plan.predicted_bytes, "predicted")]),
    ]
    columns = {name: parts for name, (_, parts) in known.items()} | {"plan": plan.parts}
    rows = (
        (
            svg.key(f"block c-{name}") + svg.escape(text),
            *(show_bytes(getattr(parts, name)) for parts in columns.values()),
        )
        for name, text in CLASSES.items()
    )
    return _bars(bars, plan.budget_bytes) + svg.named_rows(
        ["what holds it", *columns], rows, "small"
    )


def runs_figure(runs: Sequence[Run]) -> str:
    """A bar of compiled bytes for each run, divided by use if the run has a plan. Empty if no run
    has bytes.
    """
    bars = []
    for run in runs:
        if run.plan:
            bars.append((run.name, run.plan.compiled_bytes, _classes(run.plan.parts)))
        elif size := run.number("compiled_bytes"):
            bars.append((run.name, int(size), [("hollow", int(size), "compiled, without a plan")]))
    if not bars:
        return ""
    signs = [(svg.key(f"block c-{name}"), text) for name, text in CLASSES.items()]
    if any(run.plan is None for run in runs):
        signs.append((svg.key("block c-hollow"), "not told apart: no plan"))
    return _bars(bars, None) + svg.legend(signs)


def _classes(parts: Bytes) -> _Parts:
    """The parts of a bar for a compiled step's bytes."""
    return [(name, getattr(parts, name), text) for name, text in CLASSES.items()]


def _bars(bars: Sequence[tuple[str, int, _Parts]], budget: int | None) -> str:
    """Draws bars on one scale, with a line at the budget.

    bars: name, bytes and parts of each bar.
    budget: in bytes; None draws no line.
    """
    most = max(size for _, size, _ in bars) or 1
    # A budget far beyond every bar would make the bars too short. It is written in words instead.
    near = svg.near_scale(budget, most)
    most = 1.02 * max(most, near or 0)
    at = 100 * near / most if near else 0
    rule = svg.upright(at, "budget", "budget") if near is not None else ""
    rows = "".join(_bar(name, size, parts, most, rule) for name, size, parts in bars)
    if budget is None:
        return svg.element("div", rows, css="bars many")
    # The budget's text is anchored on the side of its rule where there is more room.
    said = f"budget {show_bytes(budget)}" + ("" if near is not None else ", beyond the scale →")
    anchor = "end" if at > 50 or near is None else "start"
    left = svg.percent(100 if near is None else min(at, 100))
    text = svg.element("text", svg.escape(said), css=f"tick {anchor}", x=left, y="14")
    head = '<span class="name"></span>' + svg.element("svg", text, css="sum")
    head = svg.element("div", head + '<span class="sizes"></span>', css="bar head")
    return svg.element("div", head + rows, css="bars")


def _bar(name: str, size: int, parts: _Parts, most: float, rule: str) -> str:
    """One row of the figure: a name, its parts on the scale, and their sum."""
    left, marks = 0.0, ""
    for css, part, title in parts:
        marks += svg.box(left, 100 * part / most, f"c-{css}", f"{title}: {show_bytes(part)}")
        left += 100 * part / most
    body = svg.element("svg", marks, css="body", y="5", height="20") + rule
    drawn = svg.element(
        "svg", body, css="sum", role="img", aria_label=f"{name}: {show_bytes(size)}"
    )
    sizes = svg.element("span", show_bytes(size), css="sizes")
    return svg.element(
        "div", svg.element("span", svg.breakable(name), css="name") + drawn + sizes, css="bar"
    )


def live_figure(found: Explanation, budget: int | None = None) -> str:
    """The bytes in use over the schedule, of the plan and, if known, of everything kept on the same
    scale, with a table of the bytes at the peak. Empty if XLA reported no history.

    budget: in bytes, drawn if it is near the scale; None for none.
    """
    both = [one for one in (found.beside, found) if one is not None]
    drawn = [(one.plan, one.live) for one in both if one.live is not None]
    if not drawn:
        return ""
    tags = _tags([live for _, live in drawn])
    bands = [_bands(live, tags) for _, live in drawn]
    top = max(live.total_bytes for _, live in drawn)
    near = svg.near_scale(budget, top)
    y = svg.bytes_axis(0, 1.06 * max(top, near or 0))
    figures = [
        f"<div><h4>{svg.escape(_title(name))}</h4>{_areas(name, live, own, y, near)}</div>"
        for (name, live), own in zip(drawn, bands)
    ]
    signs = [(svg.key("disc"), "the peak")]
    signs += [(svg.key("budget"), f"budget {show_bytes(near)}")] if near else []
    signs.append(("↻", "the body of a loop, which stands here once: every turn holds the same"))
    all_figures = "".join(figures)
    pair = svg.element("div", all_figures, css="pair") if len(figures) > 1 else all_figures
    return pair + svg.legend(signs) + _at_the_peak(drawn, bands)


def _title(plan: str) -> str:
    """The heading of a figure of live memory."""
    return "the plan" if plan == "under the plan" else plan


def _tags(lives: Sequence[Live]) -> dict[str, str]:
    """The CSS class of each saved part by its name, equal for all programs."""
    most: collections.Counter[str] = collections.Counter()
    for live in lives:
        for part in live.parts:
            if part.kind == "saved":
                most[part.name] = max(most[part.name], *part.bytes)
    names = [name for name, _ in most.most_common()]
    return {name: f"l-t{i}" if i < TAGS else "l-tags" for i, name in enumerate(names)}


def _bands(live: Live, tags: Mapping[str, str]) -> _Bands:
    """The bands of a program, from the bottom to the top."""
    found: _Bands = {}
    order = ["l-arguments", "l-outputs", *dict.fromkeys(tags.values())]
    for part in live.parts:
        if part.kind == "saved":
            css = tags[part.name]
            text = "further tags" if css == "l-tags" else part.name.removeprefix("saved: ")
        else:
            css, text = f"l-{part.kind}", _KINDS[part.kind]
        before = found.get(css, (text, [0] * live.points))[1]
        found[css] = text, [a + b for a, b in zip(before, part.bytes)]
    order += [css for css in found if css not in order]
    return {css: found[css] for css in order if css in found}


def _areas(name: str, live: Live, bands: _Bands, y: svg.Axis, budget: int | None) -> str:
    """The bytes in use over the schedule as stacked areas."""
    count, at, totals = live.points, live.peak, live.totals
    named = [x for x in live.phases if (x.last + 1 - x.first) / count >= _LABELLED]
    middle = lambda phase: (phase.first + phase.last + 1) / 2
    words = lambda phase: f"{'↻ ' if phase.loop else ''}{phase.name}"
    x = svg.Axis(0, count, tuple((middle(phase), words(phase)) for phase in named))
    heights, marks = [0] * count, []
    for css, (text, sizes) in bands.items():
        heights = [a + b for a, b in zip(heights, sizes)]
        title = f"{text}: {show_bytes(sizes[at])} at the peak"
        if (most := max(sizes)) > sizes[at]:
            title += f", {show_bytes(most)} at most"
        marks.append(svg.area([y.percent(h) for h in heights], css, title))
    marks.reverse()  # each area reaches down to the axis, so lower areas are drawn later
    edges = {at for phase in named for at in (phase.first, phase.last + 1)} - {0, count}
    marks += [svg.upright(x.percent(edge), "phase") for edge in sorted(edges)]
    if budget:
        marks.append(svg.across(y.percent(budget), "budget", f"budget: {show_bytes(budget)}"))
    total = f"reserved: {show_bytes(live.total_bytes)}, as compiled"
    marks.append(svg.across(y.percent(live.total_bytes), "reserved", total))
    said = f"the peak: {show_bytes(totals[at])} in use of {show_bytes(live.total_bytes)}"
    marks.append(svg.dot(x.percent(at + 0.5), y.percent(totals[at]), "chosen", said))
    title = f"Bytes in use over the schedule, {name}: {said}"
    x_title = f"schedule, {live.instructions:,} instructions"
    return svg.chart(x, y, marks, name=title, x_title=x_title, y_title="bytes in use")


def _at_the_peak(drawn: Sequence[tuple[str, Live]], bands: Sequence[_Bands]) -> str:
    """A table of the bytes of each band at the peak of each program, and of the free bytes."""
    names = {css: name for own in bands for css, (name, _) in own.items()}
    order = [f"l-{kind}" for kind in ("arguments", "outputs")]
    order += sorted(css for css in names if css.startswith("l-t"))  # "l-tags" is last
    rows = []
    for css in dict.fromkeys([*order, *names]):
        if css in names:
            held = [
                own[css][1][live.peak] if css in own else 0 for (_, live), own in zip(drawn, bands)
            ]
            sizes = (show_bytes(size) if size else "–" for size in held)
            rows.append((svg.key(f"block {css}") + svg.escape(names[css]), *sizes))
    lives = [live for _, live in drawn]
    free = (show_bytes(live.total_bytes - max(live.totals)) for live in lives)
    rows.append(("free: packing", *free))
    rows.append(("compiled", *(show_bytes(live.total_bytes) for live in lives)))
    heads = (svg.escape(_title(name)) for name, _ in drawn)
    return svg.named_rows(["at the peak", *heads], rows, "small peak")

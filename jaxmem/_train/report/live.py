"""Draws live bytes: areas over the schedule, coloured by tag, and what they are at the peak."""

import collections
from collections.abc import Mapping, Sequence

from jaxmem._core.bytes import show_bytes
from jaxmem._result.memory.explanation import Explanation
from jaxmem._result.memory.live import Live
from jaxmem._train.report.svg import (
    Axis,
    across,
    area,
    bytes_axis,
    chart,
    dot,
    escape,
    legend,
    upright,
)

TAGS = 6  # with a colour of their own, the largest; further ones share one
_KINDS = {  # in the order in which they lie on one another, saved tags after the first two
    "arguments": "arguments and model states",
    "outputs": "outputs beside the arguments",
    "untagged": "saved without a tag",
    "gradients": "gradients",
    "layer": "working memory of one layer",
    "outside": "outside the layers",
    "other": "outside the gradient",
}
_LABELLED = 0.17  # of the width that a phase takes at least for its name to stand below it


_Bands = dict[str, tuple[str, list[int]]]  # CSS class -> name, and bytes at each point


def live_figure(found: Explanation, budget: int | None = None) -> str:
    """Everything kept and the plan side by side on one scale, where both are there, with a table of
    what they hold at the peak. Nothing where XLA told no history.

    budget: in bytes, drawn where it is near; None for none.
    """
    both = [one for one in (found.beside, found) if one is not None]
    drawn = [(one.plan, one.live) for one in both if one.live is not None]
    if not drawn:
        return ""
    tags = _tags([live for _, live in drawn])
    bands = [_bands(live, tags) for _, live in drawn]
    top = max(live.total_bytes for _, live in drawn)
    near = budget if budget is not None and budget <= 1.5 * top else None
    y = bytes_axis(0, 1.06 * max(top, near or 0))
    figures = [
        f"<div><h4>{escape(_title(name))}</h4>{_chart(name, live, own, y, near)}</div>"
        for (name, live), own in zip(drawn, bands)
    ]
    key = [('<i class="key disc"></i>', "the peak")]
    key += [('<i class="key budget"></i>', f"budget {show_bytes(near)}")] if near else []
    key.append(("↻", "the body of a loop, which stands here once: every turn holds the same"))
    side_by_side = f'<div class="pair">{"".join(figures)}</div>' if len(figures) > 1 else figures[0]
    return side_by_side + legend(key) + _table(drawn, bands)


def _title(plan: str) -> str:
    return "the plan" if plan == "under the plan" else plan


def _tags(lives: Sequence[Live]) -> dict[str, str]:
    """The CSS class of each saved part by its name, one for all programs."""
    most: collections.Counter[str] = collections.Counter()
    for live in lives:
        for part in live.parts:
            if part.kind == "saved":
                most[part.name] = max(most[part.name], *part.bytes)
    names = [name for name, _ in most.most_common()]
    return {name: f"l-t{i}" if i < TAGS else "l-tags" for i, name in enumerate(names)}


def _bands(live: Live, tags: Mapping[str, str]) -> _Bands:
    """The colours of a program, from the lowest one up."""
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


def _chart(name: str, live: Live, bands: _Bands, y: Axis, budget: int | None) -> str:
    count, at, totals = live.points, live.peak, live.totals
    named = [x for x in live.phases if (x.last + 1 - x.first) / count >= _LABELLED]
    place = lambda phase: (phase.first + phase.last + 1) / 2
    words = lambda phase: f"{'↻ ' if phase.loop else ''}{phase.name}"
    x = Axis(0, count, tuple((place(phase), words(phase)) for phase in named))
    heights, marks = [0] * count, []
    for css, (text, sizes) in bands.items():
        heights = [a + b for a, b in zip(heights, sizes)]
        title = f"{text}: {show_bytes(sizes[at])} at the peak"
        if (most := max(sizes)) > sizes[at]:
            title += f", {show_bytes(most)} at most"
        marks.append(area([y.percent(h) for h in heights], css, title))
    marks.reverse()  # each reaches down to the axis, and those below it lie on top
    edges = {at for phase in named for at in (phase.first, phase.last + 1)} - {0, count}
    marks += [upright(x.percent(edge), "phase", "") for edge in sorted(edges)]
    if budget:
        marks.append(across(y.percent(budget), "budget", f"budget: {show_bytes(budget)}"))
    total = f"reserved: {show_bytes(live.total_bytes)}, as compiled"
    marks.append(across(y.percent(live.total_bytes), "reserved", total))
    said = f"the peak: {show_bytes(totals[at])} in use of {show_bytes(live.total_bytes)}"
    marks.append(dot(x.percent(at + 0.5), y.percent(totals[at]), "chosen", said))
    return chart(
        x,
        y,
        "".join(marks),
        name=f"Bytes in use over the schedule, {name}: {said}",
        x_title=f"schedule, {live.instructions:,} instructions",
        y_title="bytes in use",
    )


def _table(drawn: Sequence[tuple[str, Live]], bands: Sequence[_Bands]) -> str:
    """What each colour holds at the peak of each program, and what is free then."""
    names = {css: name for own in bands for css, (name, _) in own.items()}
    order = [f"l-{kind}" for kind in ("arguments", "outputs")]
    order += sorted(css for css in names if css.startswith("l-t"))  # "l-tags" is last
    rows = [css for css in dict.fromkeys([*order, *names]) if css in names]
    lines = []
    for css in rows:
        cells = ""
        for (_, live), own in zip(drawn, bands):
            size = own[css][1][live.peak] if css in own else 0
            cells += f"<td>{show_bytes(size) if size else '–'}</td>"
        mark = f'<i class="key block {css}"></i>'
        lines.append(f'<tr><th scope="row">{mark}{escape(names[css])}</th>{cells}</tr>')
    free = [show_bytes(live.total_bytes - max(live.totals)) for _, live in drawn]
    lines.append(f'<tr><th scope="row">free: packing</th>{"".join(f"<td>{f}</td>" for f in free)}')
    total = [f"<td>{show_bytes(live.total_bytes)}</td>" for _, live in drawn]
    lines.append(f'</tr><tr><th scope="row">compiled</th>{"".join(total)}</tr>')
    heads = "".join(f'<th scope="col">{escape(_title(name))}</th>' for name, _ in drawn)
    return (
        f'<table class="small peak"><thead><tr><th scope="col">at the peak</th>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )

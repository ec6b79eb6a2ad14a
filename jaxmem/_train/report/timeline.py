"""Draws the lanes of a step layer by layer, and the places of its layers' states."""

from jaxmem._core.bytes import show_bytes
from jaxmem._result import svg
from jaxmem._result.plan.plan import Plan
from jaxmem._result.plan.timeline import LANES, PLACED, WORK, Timeline, named, phases, summary
from jaxmem._result.plan.timeline_figure import CELLS, Panel, panels, places

_OUTER = "optimizer's arrays outside the layers"


def lanes_figure(plan: Plan) -> str:
    """The lanes of a step, with a panel for microbatches with equal lanes, and a table of the
    seconds of one layer. Empty if the plan has no lanes.
    """
    if plan.lanes is None or not (drawn := panels(plan.lanes)):
        return ""
    several = len(drawn) > 1
    figures = [
        (f"<h4>{svg.escape(panel.title)}</h4>" if several else "") + _panel(panel)
        for panel in drawn
    ]
    told = []
    if (most := max(group.count for group in plan.lanes.groups)) > CELLS:
        told.append(f"Of more than {CELLS} layers alike, up to {-(-most // CELLS)} share a mark.")
    told += [f"{line[0].upper()}{line[1:]}." for line in summary(plan.lanes)]
    return f"{''.join(figures)}{_seconds(plan.lanes)}{svg.fine(told)}"


def places_figure(plan: Plan) -> str:
    """A row of the layers, coloured by the memory of their states, with a table of the bytes in
    each memory. Empty if the plan does not place states.
    """
    if (timeline := plan.lanes) is None:
        return ""
    layers = sum(group.count for group in timeline.groups)
    cells = places(timeline) + (svg.separators(layers) if layers <= CELLS else "")
    strip = svg.element("svg", cells, css="cells", role="img", aria_label=plan.places or "")
    lines = []
    for place, start, count, *sizes in timeline.by_place():
        mark = svg.key(f"block p-{place}") + svg.escape(named(start, count))
        lines.append((mark, svg.escape(PLACED[place]), *sizes))
    outer = timeline.outer_device_bytes, timeline.outer_host_bytes
    if any(outer):
        where = "in host memory" if timeline.outer_host_bytes else "on the device"
        lines.append((svg.escape(_OUTER), where, *outer))
    here, there = (sum(sizes) for sizes in zip(*((device, host) for *_, device, host in lines)))
    lines.append(("together", "–", here, there))
    rows = [(head, where, *map(show_bytes, sizes)) for head, where, *sizes in lines]
    return strip + svg.table(["states of", "where", "on the device", "in host memory"], rows, "lie")


def _panel(panel: Panel) -> str:
    """The lanes of one pass as a figure."""
    background = svg.element("rect", css="nothing", width="100%", height="100%")
    row = lambda name, marks, css="bar": svg.element(
        "div",
        svg.element("span", svg.escape(name), css="name") + svg.element("svg", marks, css="run"),
        css=css,
    )
    rows = "".join(row(name, background + marks) for name, marks in panel.rows)
    inner = row("", panel.head, "bar edge") + rows + row("ms", panel.ticks, "bar edge")
    return svg.element("div", inner, css="lanes", role="img", aria_label=panel.said)


def _seconds(timeline: Timeline) -> str:
    """A table of the seconds of one layer of each kind in each pass, and its exposed seconds."""
    rows, seconds = [], timeline.lane_seconds()
    used = [lane for lane in LANES if lane is WORK or seconds[lane.key]]
    shown = lambda one: svg.show_ms(1e3 * one) if one else "–"
    for title, kinds in phases(timeline):
        for start, group, one in kinds:
            times = [shown(one.of(lane)) for lane in used]
            whole = svg.show_ms(1e3 * one.seconds), shown(one.exposed)
            rows.append((svg.escape(named(start, group.count)), svg.escape(title), *times, *whole))
    names = [lane.name for lane in used]
    return svg.table(["one of", "pass", *names, "together", "exposed"], rows, "passes")

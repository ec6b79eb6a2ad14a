"""Draws the outlier channels of tags by step (Adacc's figures 3 and 4), and lists the decisions of
the rectifier.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmem._core.lists import thinned
from jaxmem._result import svg
from jaxmem._train.rectifier.counts import Outliers
from jaxmem._train.runs.run import Run

COLUMNS = 256  # of a map; channels of wider tensors share them
ROWS = 24  # steps of a map: the first, the last and some between
DECISIONS = 40  # rows of the table


def outlier_maps(run: Run) -> str:
    """A map for each tag: channels from left to right, steps from top to bottom. A cell is darker
    if more of the tag's tensors have an outlier there. Empty if nothing was counted.
    """
    by_tag: dict[tuple[str, str], list[Outliers]] = {}
    for one in run.outliers:
        by_tag.setdefault((one.block, one.tag), []).append(one)
    several = len({block for block, _ in by_tag}) > 1
    maps = [
        _map(f"{block}/{tag}" if several else tag, thinned(found, ROWS))
        for (block, tag), found in by_tag.items()
    ]
    if not maps:
        return ""
    some = svg.key("outlier few"), "an outlier in some of the tag's tensors"
    return "".join(maps) + svg.legend([some, (svg.key("outlier"), "in all of them")])


def _map(name: str, found: Sequence[Outliers]) -> str:
    """A picture of one tag's outlier channels: channels across, steps downwards."""
    last = found[-1]
    columns = min(COLUMNS, last.channels)
    cells = []
    for row, one in enumerate(found):
        shares = [0] * columns
        for places in one.places:
            for column in {channel * columns // one.channels for channel in places}:
                shares[column] += 1
        for c, share in enumerate(shares):
            if share:
                at = {"x": svg.percent(100 * c / columns), "width": f"{100 / columns:.3f}%"}
                at |= {
                    "y": svg.percent(100 * row / len(found)),
                    "height": svg.percent(100 / len(found)),
                }
                opacity = f"{0.25 + 0.75 * share / max(1, len(one.counts)):.2f}"
                cells.append(svg.element("rect", css="outlier", **at, opacity=opacity))
    said = (
        f"{last.channels:,} channels; at step {last.step} at most {last.most} outliers in"
        f" one of {len(last.counts)} tensors, {100 * last.rate:.2f} % of all channels"
    )
    steps = f"steps {found[0].step} to {last.step}, downwards"
    texts = "".join(svg.element("span", svg.escape(text)) for text in (steps, said))
    caption = svg.element("figcaption", f"{svg.breakable(name)} {texts}")
    look = {"css": "outliers", "style": f"height:{9 * len(found)}px"}
    drawn = svg.element("svg", "".join(cells), **look, role="img", aria_label=f"{name}: {said}")
    return svg.element("figure", caption + drawn, css="map")


def decided(run: Run) -> str:
    """The decisions of a rectifier in order; the last ones if there are many."""
    head = ["step", "decision", "why", "predicted", "measured", "what changed"]
    lines = (
        [
            f"{row['step']:,}",
            svg.escape(row.get("event", "taken") if row["taken"] else "declined"),
            svg.breakable(row["why"]),
            _ms(row.get("predicted_seconds")),
            _ms(row.get("step_seconds")),
            _changes(row.get("changed")),
        ]
        for row in run.decisions[-DECISIONS:]
    )
    return svg.table(head, lines, "why") if run.decisions else ""


def _ms(seconds: Any) -> str:
    """Seconds as a text in milliseconds."""
    return svg.show_ms(1e3 * seconds) if isinstance(seconds, int | float) else "–"


def _changes(changed: Any) -> str:
    """The tags whose codec a decision changed, with the old and the new capacity."""
    if not isinstance(changed, Mapping) or not changed:
        return "–"
    # A rectifier changes the capacity of a codec only, so the other fields are left out.
    short = lambda what: re.sub(r"group=\d+,scale=\w+,?|\(\)", "", str(what)).replace("()", "")
    return "<br>".join(svg.breakable(f"{tag}: {short(what)}") for tag, what in changed.items())

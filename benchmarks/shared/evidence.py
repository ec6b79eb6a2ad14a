"""Writes docs/evidence.md: the claims of the papers, and jaxmem's, beside the committed results.

    python -m benchmarks.shared.evidence

The claims are in `benchmarks/shared/evidence.toml`. A number comes from a file of
`benchmarks/results/` and from no other place. Nothing is measured here.
"""

import fnmatch
import pathlib
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.shared.results import RESULTS
from benchmarks.shared.sources import ROOT
from jaxmem._core.files import read_json
from jaxmem._result.svg import element, escape

CLAIMS = pathlib.Path(__file__).parent / "evidence.toml"
PAGE = ROOT / "docs" / "evidence.md"
UNBROKEN = "\N{NO-BREAK SPACE}%"
PASSED = 0.05  # beyond the goal by this share or more
OF_VALUES = {
    "at": lambda values: values[0],
    "max": max,
    "median": lambda values: statistics.median(map(abs, values)),
    "share": statistics.mean,  # of true values
}
KINDS = {
    "measured": "measured: ran on two CPU cores",
    "measured on an H200": "measured on an H200: ran on that GPU",
    "compiled": "compiled: bytes of programs that XLA compiled for devices that are absent",
    "predicted": "predicted: seconds of XLA's estimate or of a roofline; no step ran",
}


def values(found: Any, keys: Sequence[str | int]) -> Iterator[Any]:
    """The values under keys, where a key may be a pattern. A key that some dictionaries of a
    pattern lack is left out there.
    """
    if not keys:
        yield found
    elif isinstance(found, list):
        for one in found if keys[0] == "*" else [found[int(keys[0])]]:
            yield from values(one, keys[1:])
    elif isinstance(found, dict):
        for name in [keys[0]] if keys[0] in found else fnmatch.filter(found, str(keys[0])):
            yield from values(found[name], keys[1:])


def result_of(claim: dict[str, Any]) -> dict[str, Any]:
    """The file of a claim's result; empty if there is no such file."""
    path = RESULTS / f"{claim.get('result')}.json"
    return read_json(path) if path.exists() else {}


def number(claim: dict[str, Any]) -> float | None:
    """The number of a claim. None if no result answers the claim, or its file does not exist.

    Raises KeyError if the file has no such number.
    """
    if not (file := result_of(claim)):
        return None
    how, *keys = claim["value"]
    found = list(values(file, keys))
    under = list(values(file, claim["over"])) if "over" in claim else [1]
    if not found or not under:
        missing = f"{claim['result']}.json has no {claim['value']}"
        raise KeyError(f"{missing}; expected a number for the page")
    return claim.get("factor", 1) * OF_VALUES[how](found) / under[0]


def outcome(claim: dict[str, Any], found: float | None) -> str:
    """In one word whether the goal of a claim is reached, and by how much not."""
    if found is None:
        return "not to be had" if "missing" in claim else "not measured yet"
    if "goal" not in claim:
        return "no goal"
    goal = claim["goal"]
    if claim["better"] == "nearer 0":
        found, better = abs(found), -1
    else:
        better = 1 if claim["better"] == "more" else -1
    margin = better * (found - goal) / (abs(goal) or 1)
    if margin < 0:
        if found * goal < 0:
            return "**short**: of the other sign"
        short = 100 * -margin
        return f"**short** by {short:.2g} %" if short < 10 else f"**short** by {short:.0f} %"
    return "passed" if margin >= PASSED and goal else "met"


def rows() -> list[dict[str, Any]]:
    """The claims, each with its number, its outcome, and the commit of its result."""
    found = []
    for claim in tomllib.loads(CLAIMS.read_text(encoding="utf-8"))["claim"]:
        value, commit = number(claim), result_of(claim).get("commit")
        own = {"number": value, "outcome": outcome(claim, value)}
        found.append(claim | own | {"commit": commit[:7] if commit else "not recorded"})
    return found


def table(claims: Sequence[dict[str, Any]]) -> str:
    """A table of claims in Markdown."""
    names = "Code", "Claim", "Reported", "Here", "Goal", "Outcome", "Result"
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for c in claims:
        here = "–" if c["number"] is None else c["shown"].format(c["number"]).replace("-", "−")
        goal = "–"
        if "goal" in c:
            word = {"more": "at least", "less": "at most", "nearer 0": "within"}[c["better"]]
            goal = f"{word} {c['shown'].replace('+', '').format(c['goal'])}"
        why = c.get("missing", c.get("note"))
        claim = c["claim"] + (f". {why[0].upper()}{why[1:]}" if why else "")
        source = f"{c['kind']}, `{c['result']}` ({c['commit']})" if c["number"] is not None else "–"
        joined = (text.replace(" %", UNBROKEN) for text in (here, goal, c["outcome"]))
        cells = c["code"], claim, c.get("reported", "–"), *joined, source
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# -- Plots


# By the end of the file's name: the result, the key of a bar's number, the mark, and the title.
PLOTS = {
    "published": (
        "published_steps", "ratio", 1.0, "Predicted step time divided by the published step time",
    ),
    "batches": ("max_batch", "batch", None, "Largest batch within 32 GB, compiled for an H200"),
}  # fmt: skip


def plot(result: str, key: str, mark: float | None, title: str) -> str:
    """A bar for each row of a result that has the key."""
    rows = read_json(RESULTS / f"{result}.json")["results"]
    bars = {name: row[key] for name, row in rows.items() if key in row}
    return bar_plot(bars, mark, title)


def bar_plot(bars: dict[str, float], mark: float | None, title: str) -> str:
    """Horizontal bars as an SVG file, for a light and a dark page.

    mark: where a vertical line is drawn.
    """
    step, left, width, right = 24, 230, 400, 70
    high, scale = step * (len(bars) + 2), width / max(*bars.values(), mark or 0)
    style = (
        "text{font:13px sans-serif;fill:#222}.bar{fill:#4c6ef5}.mark{stroke:#c92a2a}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.bar{fill:#748ffc}.mark{stroke:#ff8787}}"
    )
    inner = element("title", escape(title)) + element("style", style)
    inner += element("text", escape(title), x=8, y=18, font_weight="bold")
    for row, (name, value) in enumerate(bars.items()):
        y = step * (row + 1) + 6
        inner += element("text", escape(name), x=left - 8, y=y + 14, text_anchor="end")
        inner += element(
            "rect", css="bar", x=left, y=y + 2, height=step - 8, width=f"{value * scale:.1f}"
        )
        inner += element("text", f"{value:.4g}", x=left + width + 8, y=y + 14)
    if mark is not None:
        at = f"{left + mark * scale:.1f}"
        inner += element("line", css="mark", x1=at, x2=at, y1=step, y2=high - step // 2)
    box = {"viewBox": f"0 0 {left + width + right} {high}", "xmlns": "http://www.w3.org/2000/svg"}
    return element("svg", inner, width=left + width + right, height=high, role="img", **box) + "\n"


def page() -> str:
    """The page, in Markdown."""
    claims = rows()
    count = lambda word: sum(c["outcome"].lstrip("*").startswith(word) for c in claims)
    words = "passed", "met", "short", "not to be had", "not measured yet"
    told = ", ".join(f"{n} {word}" for word in words if (n := count(word)))
    kinds = "\n".join(f"- {text}" for text in KINDS.values())
    parts = [
        "# Evidence",
        "`python -m benchmarks.shared.evidence` writes this page from `benchmarks/results/` and"
        " `benchmarks/shared/evidence.toml`. Do not edit it.",
        f"The page compares the claims of the three papers, and jaxmem's, with what was measured"
        f' here. Of {len(claims)} claims: {told}. "Passed" is better than the goal by 5 % or'
        " more. [Results](results.md) describes each script, and"
        " `make stale` lists the results that are older than the code.",
        "**One GPU, an H200, ran fourteen steps of jaxmem; no TPU has run any.** A result is of one"
        " of four kinds:",
        kinds,
    ]
    for paper in dict.fromkeys(c["paper"] for c in claims):
        parts += [f"## {paper}", table([c for c in claims if c["paper"] == paper])]
    parts += ["## Plots"]
    for name, about in PLOTS.items():
        path = PAGE.parent / "assets" / f"evidence-{name}.svg"
        path.write_text(plot(*about), encoding="utf-8")
        parts += [f"![{name}](assets/{path.name})"]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)

"""Makes plans, runs and pages for tests of the report, and checks that a page is well-formed."""

import html.parser
import json
import re

from jaxmem import plans
from jaxmem._core.actions import KEEP, OFFLOAD, RECOMPUTE, Action, Choice
from jaxmem._result.plan.plan import Plan
from jaxmem._result.plan.rows import Bytes, Point, Row
from jaxmem._train.report.report import report_runs

CODEC = "bit_mask()"
CODED = [Choice(action, CODEC) for action in (Action.COMPRESS, Action.COMPRESS_OFFLOAD)]
CHOICES = (KEEP, RECOMPUTE, CODED[0], OFFLOAD, CODED[1])
MIB = 2**20
HOSTILE = "\"'><script>alert(1)</script>&\ud800"
VOID = {"meta", "wbr", "br"}


def row(choice, tag="up", block="block", layers=4, **other):
    fields = {
        "kind": "linear", "shape": (8, 256), "dtype": "float32", "milliseconds": 0.25,
        "why": "keep: +1 ms a step", "choice": choice, "layers": layers, "bytes_before": 8 * MIB,
        "bytes_after": 8 * MIB if choice == KEEP else 0,
    }  # fmt: skip
    return Row(block, tag, **(fields | other))


def made(*rows, **other):
    rows = rows or tuple(row(choice, tag=f"tensor_{i}") for i, choice in enumerate(CHOICES))
    actions = {}
    for r in rows:
        actions.setdefault(r.block, {})[r.tag] = r.choice
    fields = {
        "actions": actions, "rows": rows, "notes": ("offload is dear here",),
        "budget_bytes": 100 * MIB,
        "predicted_bytes": 63 * MIB, "compiled_bytes": 70 * MIB, "baseline_bytes": 220 * MIB,
        "host_bytes": 32 * MIB, "predicted_seconds": 0.02, "baseline_seconds": 0.015,
        "profile_seconds": 1.0, "solve_seconds": 0.1, "compile_seconds": 9.0, "compiles": 2,
        "time_source": "measured", "target": "local", "fingerprint": "abc", "jax_version": "0.10.2",
        "parts": Bytes(10 * MIB, 20 * MIB, 40 * MIB),
        "baseline_parts": Bytes(10 * MIB, 170 * MIB, 40 * MIB),
        "points": (Point(60 * MIB, 0.025), Point(80 * MIB, 0.018), Point(220 * MIB, 0.015)),
    }  # fmt: skip
    return Plan(**(fields | other))


def write_run(folder, plan=None, losses=(), rows=(), decisions=(), outliers=(), **summary):
    folder.mkdir(parents=True, exist_ok=True)
    if plan is not None:
        plan.save(folder / "plan.json")
    rows = rows or [{"step": i, "loss": n, "grad_norm": 1.0} for i, n in enumerate(losses, 1)]
    for name, found in {"metrics": rows, "decisions": decisions, "outliers": outliers}.items():
        if found:
            text = "".join(json.dumps(row) + "\n" for row in found)
            (folder / f"{name}.jsonl").write_text(text)
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return str(folder)


def page_of(tmp_path, *runs):
    out = tmp_path / "page.html"
    assert report_runs(list(runs), out) == str(out)
    return checked(out)


def page_of_plan(tmp_path, plan=None, **given):
    out = tmp_path / "page of a plan" / "page.html"
    plans.report(plan or made(), out, **given)
    return checked(out)


class Reader(html.parser.HTMLParser):
    """Checks that elements are closed in order. Records what the page would load or run."""

    def __init__(self):
        super().__init__()
        self.opened, self.wrong, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.opened += [tag] if tag not in VOID else []
        values = dict(attrs)
        loads = lambda key: key in ("src", "href", "xlink:href") or key.startswith("on")
        self.wrong += [(tag, key, value) for key, value in attrs if loads(key)]
        for name in ("x", "y", "width", "x1", "x2", "cx", "cy"):
            number = values.get(name, "0").removesuffix("%")
            assert re.fullmatch(r"-?\d+(\.\d+)?", number), (tag, name, number)

    def handle_endtag(self, tag):
        assert self.opened.pop() == tag


def checked(path):
    """Returns a page, after the checks that hold for every page."""
    text, reader = path.read_text("utf-8"), Reader()
    reader.feed(text)
    reader.close()
    assert reader.opened == reader.wrong == []
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", text)
    outside = re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL)
    assert not re.search(r"\bnan\b|\binf\b", outside, re.IGNORECASE)
    assert len(text.encode()) < 2 * 10**6
    return text

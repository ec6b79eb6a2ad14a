"""The tables of a page: why each tensor got its action, what was run, what crosses to host memory,
and how to make it again.
"""

import json
from collections.abc import Iterable, Sequence

from jaxmem._core.bytes import show_bytes
from jaxmem._result.memory.moved import Moved, by_direction, share_beside, way_of
from jaxmem._result.plan.plan import Plan
from jaxmem._result.plan.rows import Row
from jaxmem._train.report.bars import chip
from jaxmem._train.report.svg import breakable, escape, show_ms
from jaxmem._train.runs.read import Run

_SETTINGS = 20_000  # characters shown


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def why(rows: Sequence[Row]) -> str:
    several = len({row.block for row in rows}) > 1
    head = ["tensor", "kind", "shape", "type", "action", "codec", "before", "after", "time", "why"]
    lines = (
        [
            breakable(f"{row.block}/{row.tag}" if several else row.tag),
            escape(row.kind or "–"),
            escape((f"{row.count} of " if row.count > 1 else "") + _shape(row.shape)),
            escape(row.dtype),
            f'<span class="action">{chip(row.choice.action)}'
            f"{escape(row.choice.action.value.replace('_', '+'))}</span>",
            escape((row.choice.codec or "–").replace("()", ""))
            .replace("(", "<wbr>(")
            .replace(",", ", "),
            show_bytes(row.bytes_before),
            show_bytes(row.bytes_after),
            show_ms(row.milliseconds),
            escape(row.why),
        ]
        for row in rows
    )
    return table(head, lines, "why")


def measured(plan: Plan) -> str:
    """The steps that were run for a plan, fastest first; empty where none was."""
    head = ["step", "median", "lower quartile", "upper quartile", "rounds", "bytes"]
    lines = (
        [
            escape(one.name + (" (chosen)" if one.chosen else "")),
            *(show_ms(1e3 * seconds) for seconds in (one.median, one.lower, one.upper)),
            str(one.rounds),
            show_bytes(one.bytes),
        ]
        for one in sorted(plan.measured, key=lambda one: one.median)
    )
    return table(head, lines, "measured") if plan.measured else ""


def moved(rows: Sequence[Moved]) -> str:
    """What a step moves between device and host memory, with the sum of each direction; empty where
    it moves nothing.
    """
    head = ["what", "direction", "how", "bytes a step", "beside products"]
    lines = []
    for direction, some in by_direction(rows):
        for row in some:
            size = show_bytes(row.bytes)
            lines.append([row.name, direction, way_of(row), size, share_beside([row])])
        total = show_bytes(sum(row.bytes for row in some))
        lines.append(["together", direction, "–", total, share_beside(some)])
    cells = ([breakable(name), *map(escape, others)] for name, *others in lines)
    return table(head, cells, "moved") if lines else ""


def again(run: Run) -> str:
    command = run.summary.get("command")
    parts = [f"<pre>{escape(command)}</pre>"] if command else []
    facts: dict[str, str] = {}
    if (p := run.plan) is not None:
        if not command:
            call = f"jaxmem.plan(build, *arguments, budget={p.budget_bytes}, target={p.target!r})"
            parts.append(f"<pre>{escape(call)}</pre>")
        took = (p.profile_seconds, p.solve_seconds, p.compile_seconds)
        facts |= {
            "budget": f"{p.budget_bytes:,} bytes",
            "compiled": f"{p.compiled_bytes:,} bytes",
            "planned with": f"jax {p.jax_version}",
            "the blocks' fingerprint": p.fingerprint,
            "planning took": "profile {:.1f} s, solve {:.1f} s, compile {:.1f} s".format(*took),
        }
    if run.summary.get("jax_version"):
        facts["ran with"] = f"jax {run.summary['jax_version']}"
    lines = (f'<tr><th scope="row">{k}</th><td>{escape(v)}</td></tr>' for k, v in facts.items())
    parts.append(
        f'<table class="small facts"><tbody>{"".join(lines)}</tbody></table>' if facts else ""
    )
    if settings := run.summary.get("settings"):
        text = json.dumps(settings, indent=1)
        text = text if len(text) <= _SETTINGS else text[:_SETTINGS] + " …"
        parts.append(f"<details><summary>settings</summary><pre>{escape(text)}</pre></details>")
    return "".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], css: str) -> str:
    """A table whose cells know their column, so that it can fold where it is narrow. Cells are
    HTML.
    """
    line = lambda cells: "".join(
        f'<td data-label="{escape(h)}"{" class=none" * (c == "–")}>{c}</td>'
        for h, c in zip(head, cells)
    )
    tops = "".join(f'<th scope="col">{escape(h)}</th>' for h in head)
    body = "".join(f"<tr>{line(cells)}</tr>" for cells in rows)
    return f'<table class="wide {css}"><thead><tr>{tops}</tr></thead><tbody>{body}</tbody></table>'

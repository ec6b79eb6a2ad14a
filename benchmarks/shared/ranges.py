"""Plans over a range of budgets: the budgets between two sizes, and what the plans come to."""

import statistics
from collections.abc import Iterable
from typing import Any


def between(least: int, most: int, count: int) -> dict[str, int]:
    """`count` budgets that divide a range evenly, its ends left out, by their share of it."""
    return {
        f"{i}/{count + 1}": least + (most - least) * i // (count + 1) for i in range(1, count + 1)
    }


def from_to(low: int, high: int, count: int) -> list[int]:
    """`count` budgets that divide a range evenly, its ends among them."""
    return [low + (high - low) * i // (count - 1) for i in range(count)]


def of_rows(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What the rows of `Step.attempt` come to."""
    rows = list(rows)
    found = [row for row in rows if row["found"]]
    of = lambda key: [row[key] for row in found]
    return {
        "budgets": len(rows),
        "found": len(found),
        "within": sum(row["compiled_bytes"] <= row["budget"] for row in found),
        "most compiles": max(of("compiles")),
        "median compiles": statistics.median(of("compiles")),
        "median share of budget": statistics.median(of("share_of_budget")),
        "median prediction error": statistics.median(of("prediction_error")),
        "largest prediction error": max(of("prediction_error")),
        "longest seconds": max(of("wall_seconds")),
    }

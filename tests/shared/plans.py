"""A small plan that was never compiled, for tests that show and compare plans."""

import dataclasses

from jaxmem._core.actions import KEEP, OFFLOAD, RECOMPUTE, Choice
from jaxmem._result.plan.plan import Plan
from jaxmem._result.plan.rows import Bytes, Point, Row

CODEC = "grouped_symmetric(group=64,scale=bfloat16)"
UP = Choice("compress", CODEC)
WHY = "recompute would cost 0.021 ms a step more, and nothing else fits <here> & now"


def row(tag: str, choice: Choice, why: str = WHY) -> Row:
    return Row(
        block="block",
        tag=tag,
        kind="linear",
        shape=(4, 8),
        dtype="float32",
        choice=choice,
        bytes_before=1536,
        bytes_after=512,
        milliseconds=0.25,
        why=why,
        layers=1,
    )


def plan(**changes) -> Plan:
    """Returns a plan for two tags of one block, with a budget of 10 MiB on an H200."""
    made = Plan(
        actions={"block": {"h": KEEP, "up": UP}},
        budget_bytes=10 * 2**20,
        predicted_bytes=8 * 2**20,
        compiled_bytes=9 * 2**20,
        baseline_bytes=20 * 2**20,
        host_bytes=0,
        predicted_seconds=0.012,
        baseline_seconds=0.010,
        profile_seconds=0.1,
        solve_seconds=0.1,
        compile_seconds=0.1,
        compiles=3,
        time_source="roofline",
        target="h200",
        fingerprint="abc",
        jax_version="0.11.2",
        parts=Bytes(4, 3, 2),
        baseline_parts=Bytes(4, 14, 2),
        points=(
            Point(8, 1.5, {"block": {"h": RECOMPUTE, "up": UP}}),
            Point(20, 0.9, uncertain_seconds=0.1),
        ),
        rows=(row("h", KEEP), row("up", UP)),
        notes=("offload is left out: this is a test",),
    )
    return dataclasses.replace(made, **changes)


def reloaded(made: Plan, folder) -> Plan:
    """Saves a plan in a folder, and returns the plan that is read from the file."""
    made.save(folder / "plan.json")
    return Plan.load(folder / "plan.json")


def other() -> Plan:
    """Returns a plan for the same model with a smaller budget, another source of times, and one
    more tag.
    """
    return plan(
        actions={"block": {"h": RECOMPUTE, "up": UP, "new": OFFLOAD}},
        budget_bytes=8 * 2**20,
        predicted_seconds=0.013,
        time_source="measured",
        microbatches=4,
    )

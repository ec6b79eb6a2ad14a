"""Rejects numbers for which a solver would return wrong answers, and names their fields."""

import math

from jaxmem._core.profile import BlockClass
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem.errors import SolverError


def check_problem(problem: ActionProblem) -> None:
    """Raises SolverError at the first cost, size, limit or graph edge that no solver can use."""
    _check_limits(problem)
    profile = problem.profile
    for block in profile.blocks:
        for what in ("layers", "runs", "forward_seconds", "backward_seconds", "span_seconds"):
            _check_number(getattr(block, what), f"`{what}` of block {block.name!r}")
        for v, size in enumerate(block.values):
            _check_number(size, f"bytes of value {v} of block {block.name!r}")
        _check_graph(block)
        for tag in block.tags:
            for option in tag.options:
                for what in ("device_bytes", "host_bytes", "seconds", "doubt"):
                    where = (
                        f"`{what}` of option `{option.choice}` of tag {tag.name!r} of block"
                        f" {block.name!r}"
                    )
                    _check_number(getattr(option, what), where)
        # The bytes of every transfer are divided by the link's rate. So a profile without a rate
        # may only have choices that transfer nothing.
        if (
            any(o.host_bytes for t in block.tags for o in t.options)
            and not profile.link_bytes_per_second > 0
        ):
            raise SolverError(
                f"`link_bytes_per_second` is {profile.link_bytes_per_second}, and block"
                f" {block.name!r} has choices that offload; expected a positive number: measure the"
                " host link, or leave offload out of the actions"
            )


def _check_limits(problem: ActionProblem) -> None:
    for name, limit in (("room", problem.room), ("host_room", problem.host_room)):
        if limit is not None and not math.isfinite(limit):
            raise SolverError(f"`{name}` is {limit}; expected bytes, or None for no limit")
    learned = {
        "working": (problem.working, "bytes"),
        "corrections": (problem.corrections, "seconds"),
    }
    for name, (by_key, unit) in learned.items():
        for key, number in by_key.items():
            if not math.isfinite(number):
                raise SolverError(
                    f"`{name}` of {key} is {number}; expected finite {unit}: fit them again"
                )


def _check_graph(block: BlockClass) -> None:
    """Raises SolverError unless every value that an equation reads is an input, a free value, or
    the output of an earlier equation.

    The loops in `cost` and `demand` go through the equations once, from the last to the first. So
    they would miss the demand for an equation that is sorted after the equations that read it.
    """
    if block.input_seconds and len(block.input_seconds) != len(block.inputs):
        raise SolverError(
            f"`input_seconds` of block {block.name!r} has {len(block.input_seconds)} entries for"
            f" {len(block.inputs)} inputs; expected as many, or none"
        )
    for seconds in block.input_seconds:
        _check_number(seconds, f"`input_seconds` of block {block.name!r}")
    known = set(block.inputs) | set(block.free)
    for i, equation in enumerate(block.equations):
        where = f"equation {i} ({equation.primitive}) of block {block.name!r}"
        _check_number(equation.seconds, f"seconds of {where}")
        if lost := [v for v in equation.inputs if v not in known]:
            raise SolverError(
                f"{where} reads value {lost[0]}, which nothing before it makes; sort the equations"
            )
        known.update(equation.outputs)
    if lost := [v for v in block.needed if v not in known]:
        raise SolverError(
            f"block {block.name!r} needs value {lost[0]}, which no equation makes and no input"
            " brings"
        )


def _check_number(number: float, where: str) -> None:
    if not (math.isfinite(number) and number >= 0):
        raise SolverError(
            f"{where} is {number}; expected a finite number, zero or more: profile the step again"
        )

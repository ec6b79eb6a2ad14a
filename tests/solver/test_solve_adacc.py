"""Adacc's own formulation (eq. 4-8) and example (Table 1), solved by our program."""

import itertools
import math

import pytest

from jaxmem._core.actions import KEEP, RECOMPUTE
from jaxmem._core.profile import Option
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solve import solve
from tests.shared.profiles import INT4, block, profile

pytestmark = pytest.mark.core
MB = 1_000_000

# Adacc Table 1: size MB, recompute ms, compress and decompress ms, compressed MB
TABLE_1 = {
    "T1": (96, 0.36, 0.37, 24),
    "T2": (42, 1.02, 0.16, 11.8),
    "T3": (42, 0.58, 0.16, 11.8),
    "T4": (10.5, 0.04, 0.04, 2.6),
}
OP_1 = {"T0": (42, math.inf, 0.16, 11.8)}


def table_1(compress_input: bool):
    """Each tensor made from the block's input, which the backward reads too; keeping is free, as in
    eq. 4.
    """
    equations, sizes, named = (
        [([0], [1], 0.0, "T0")],
        [42 * MB, 42 * MB],
        {"T0": [Option(KEEP, 42 * MB, 0, 0.0)]},
    )
    if compress_input:
        named["T0"].append(Option(INT4, round(11.8 * MB), 0, 0.16e-3))
    for name, (size, recompute, compress, small) in TABLE_1.items():
        raw = len(sizes)
        sizes += [round(size * MB)] * 2
        equations += [([1], [raw], recompute * 1e-3, None), ([raw], [raw + 1], 0.0, name)]
        named[name] = [
            Option(KEEP, round(size * MB), 0, 0.0),
            Option(INT4, round(small * MB), 0, compress * 1e-3),
        ]
    return profile(block(equations, [1, *range(3, len(sizes), 2)], sizes, named))


def eq_4_to_8(room_mb: float) -> float | None:
    """Least milliseconds over all R (0 recompute, 1 compress, 2 retain), R of the first operator
    never 0.
    """
    tensors = [*OP_1.values(), *TABLE_1.values()]
    feasible = [
        sum((recompute, compress, 0.0)[r] for r, (_, recompute, compress, _) in zip(rs, tensors))
        for rs in itertools.product((0, 1, 2), repeat=len(tensors))
        if rs[0] != 0
        and sum((0, small, size)[r] for r, (size, _, _, small) in zip(rs, tensors)) <= room_mb
    ]
    return min(feasible, default=None)


def test_adacc_table_1():
    solution = solve(ActionProblem(table_1(compress_input=False), room=(25 + 42) * MB))
    choices = solution.actions["block"]
    assert [choices[t] for t in TABLE_1] == [RECOMPUTE, INT4, INT4, RECOMPUTE]
    assert solution.seconds == pytest.approx((0.36 + 0.16 + 0.16 + 0.04) * 1e-3)


def test_adacc_equations_4_to_8_at_every_budget():
    made = table_1(compress_input=True)
    for room_mb in range(0, 240, 4):
        solution, want = solve(ActionProblem(made, room=room_mb * MB)), eq_4_to_8(room_mb)
        assert (solution is None) == (want is None)
        assert solution is None or solution.seconds == pytest.approx(
            want * 1e-3, rel=1e-6, abs=1e-12
        )

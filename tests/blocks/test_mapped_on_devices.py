"""Gradients under plans for tags inside a `jax.shard_map` are those without a checkpoint, on eight
devices in a process of their own.
"""

import itertools

import pytest

from tests.shared import children

EXACT = "keep", "recompute", "offload", "loop", "auto"
KINDS = "wholly", "partly", "by_tensor", "summed", "ring", "ruled"


def errors(*names) -> dict[str, dict[str, float]]:
    found: dict = {}
    for row in children.rows(children.with_cpus(8), "tests.programs.mapped_gradients", *names):
        found |= row
    assert set(found) == set(names)
    return found


def check(found):
    for name, of_plan in found.items():
        exact = {plan: of_plan[plan] for plan in EXACT}
        assert exact == pytest.approx(dict.fromkeys(EXACT, 0.0), abs=1e-10), name
        # A codec in the place of the tensor changes the gradient, and not by much.
        assert 1e-4 < of_plan["compress"] < 0.5, name


def test_gradients_are_those_without_a_checkpoint():
    check(errors("wholly:Auto:unchecked"))


@pytest.mark.slow
def test_gradients_in_every_other_way():
    every = itertools.product(KINDS, ("Auto", "Explicit"), ("checked", "unchecked"))
    check(errors(*(":".join(one) for one in every)))

"""Chooses the number of microbatches of a step: each candidate number is planned, and the fastest
plan is returned.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import jax

from jaxmem._core.assignment import FLOAT
from jaxmem._core.bytes import show_bytes
from jaxmem._cost.profile.doubt import MIN_GAIN_DEFAULT
from jaxmem._planner.search.step_time import worth_its_loss
from jaxmem._result.plan.plan import Plan
from jaxmem.errors import BudgetError, StepError


def checked(numbers: Sequence[int]) -> list[int]:
    """Returns the numbers in ascending order, each once.

    Raises StepError for an empty sequence, and for numbers that are not whole or less than 1.
    """
    # True and False are ints in Python.
    whole = isinstance(numbers, Iterable) and all(
        isinstance(n, int) and not isinstance(n, bool) for n in numbers
    )
    ascending = sorted(set(numbers)) if whole else []
    if not ascending or ascending[0] < 1:
        raise StepError(
            f"plan: `microbatches` is {numbers!r}; expected whole numbers of at least 1, such as"
            " (1, 2, 4, 8)"
        )
    return ascending


def numbers_for(args: tuple, devices: int) -> list[int]:
    """The candidate numbers of microbatches if the user passes none: powers of two, up to 16, that
    divide the examples of a minibatch on each device. The leading axes of the argument after the
    state give the number of examples.

    Raises StepError if the arrays of this argument have no leading axis, or are functions of a
    size.
    """
    leaves = jax.tree.leaves(args[1:2])
    lengths = [a.shape[0] for a in leaves if len(getattr(a, "shape", ())) > 0]
    if not lengths or any(map(callable, leaves)):
        raise StepError(
            "plan: `decide` has 'microbatches', and no argument after the state has the length of a"
            " minibatch; expected `microbatches`, such as (1, 2, 4, 8)"
        )
    each = math.gcd(*lengths)
    return [n for n in (1, 2, 4, 8, 16) if each % (n * devices) == 0] or [1]


def fastest_plan(numbers: Sequence[int], plan_for: Callable[[int], Plan]) -> Plan:
    """Returns the plan of least predicted time over numbers of microbatches.

    Once a plan keeps everything, more microbatches only cost time. So the search ends there. A plan
    with moments in 8 bits must gain at least 2 % of the step time plus the uncertainty over the
    fastest plan with float moments.

    numbers: numbers of microbatches, in ascending order.
    plan_for: makes the plan for one number, or raises BudgetError if no plan fits.

    Raises BudgetError, with the least bytes over all numbers, if no number fits.
    """
    plans, failures = [], []
    for number in numbers:
        try:
            plans.append(dataclasses.replace(plan_for(number), microbatches=number))
        except BudgetError as error:
            # An error without bytes does not mean that the step is too large. It may mean that no
            # assignment meets `host_budget`.
            if error.least_bytes is None:
                raise
            failures.append((error.least_bytes, number, error))
            continue
        if plans[-1].keeps_everything and plans[-1].moments == FLOAT:
            break
    if not plans:
        least, number, error = min(failures, key=lambda f: f[:2])
        tried = ", ".join(map(str, numbers))
        raise BudgetError(
            f"plan: none of {tried} microbatches fits; the least, {show_bytes(least)}, is with"
            f" {number}: {error}",
            least_bytes=least,
            least_budget=error.least_budget,
        ) from error
    seconds = lambda plan: plan.predicted_seconds
    best, exact = min(plans, key=seconds), [plan for plan in plans if plan.moments == FLOAT]
    uncertain = max(plan.uncertain_seconds for plan in plans)
    noticed = lambda other: MIN_GAIN_DEFAULT * seconds(other) + uncertain
    return best if best.moments == FLOAT else worth_its_loss(best, exact, seconds, noticed)

"""Chooses in how many microbatches a step takes its batch: each number is planned, and the fastest
plan is taken.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax

from jaxmem._core.bytes import show_bytes
from jaxmem._result.plan.plan import Plan
from jaxmem.errors import BudgetError, StepError


def checked(numbers: Sequence[int]) -> list[int]:
    """Returns the numbers in ascending order, each once.

    Raises StepError if there are none, or some that are no whole numbers of at least 1.
    """
    # True and False are ints in Python.
    found = (
        sorted(set(numbers))
        if all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)
        else []
    )
    if not found or found[0] < 1:
        raise StepError(
            f"plan: `microbatches` is {numbers!r}; expected whole numbers of at least 1, such as"
            " (1, 2, 4, 8)"
        )
    return found


def numbers_for(args: tuple, devices: int) -> list[int]:
    """The numbers of microbatches to choose from where a user names none: powers of two, up to 16,
    that divide what each device has of a minibatch, the leading axes of the argument after the
    state.

    Raises StepError where these have no leading axis, or none yet.
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


def fastest(numbers: Sequence[int], plan_for: Callable[[int], Plan]) -> Plan:
    """Returns the plan of least predicted time over numbers of microbatches.

    More microbatches only cost time once everything is kept, so that the search ends there.

    numbers: in ascending order.
    plan_for: makes the plan for one number, or raises BudgetError if it does not fit.

    Raises BudgetError, with the least bytes of all, if no number fits.
    """
    plans, failures = [], []
    for number in numbers:
        try:
            plans.append(dataclasses.replace(plan_for(number), microbatches=number))
        except BudgetError as error:
            # An error without bytes does not say that the step is too large, but for example that
            # no assignment meets `host_budget`.
            if error.least_bytes is None:
                raise
            failures.append((error.least_bytes, number, error))
            continue
        if plans[-1].keeps_everything:
            break
    if not plans:
        least, number, error = min(failures, key=lambda f: f[:2])
        tried = ", ".join(map(str, numbers))
        raise BudgetError(
            f"plan: none of {tried} microbatches fits; the least, {show_bytes(least)}, is with"
            f" {number}: {error}",
            least_bytes=least,
        ) from error
    return min(plans, key=lambda p: p.predicted_seconds)

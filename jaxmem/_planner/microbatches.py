"""A plan that also chooses in how many microbatches a step takes its batch: each number is planned,
the fastest is taken.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jaxmem._core.bytes import show_bytes
from jaxmem._plan.plan import Plan
from jaxmem.errors import BudgetError, StepError


def checked(numbers: Sequence[int]) -> list[int]:
    """In ascending order. Raises StepError if they are no numbers of microbatches."""
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


def fastest(numbers: Sequence[int], plan_for: Callable[[int], Plan]) -> Plan:
    """The plan of least predicted time over numbers of microbatches, in ascending order.

    More microbatches only cost time once everything is kept, so that the search ends there. Raises
    BudgetError, with the least bytes of all, if no number fits.
    """
    plans, failures = [], []
    for number in numbers:
        try:
            plans.append(dataclasses.replace(plan_for(number), microbatches=number))
        except BudgetError as error:
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

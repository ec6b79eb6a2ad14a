"""Says what it would have brought to compress values that `checkpoint_name` names, where the user
did not ask for it.

Their authors never agreed to a loss, so that `jaxmem.plan` leaves codecs out for them unless
`actions` says otherwise. Nothing is said that the same problem, solved with these codecs, does not
bear out; that a budget would have been met, only where such a plan compiled within it.
"""

import dataclasses
from collections.abc import Callable

from jaxmem._core.bytes import show_bytes
from jaxmem._core.profile import Profile
from jaxmem._planner.search.candidates import fastest
from jaxmem._planner.solve.solution import Solution
from jaxmem._planner.trials.clock import LEAST_GAIN
from jaxmem._planner.trials.state import Search
from jaxmem._planner.trials.trial import Trial
from jaxmem.errors import StepError

ASK = 'it was not asked for: give actions="all"'


def would_fit(search: Search, wider: Callable[[], Profile]) -> str:
    """The end of a sentence about a budget that was not met: which values, compressed, would have
    met it. Empty where none would have.

    search: compiles the plan that shows it.
    wider: makes the profile that has prices for codecs of all values.
    """
    found = _solved(search, wider)
    if found is None:
        return ""
    solution, names = found
    (step,) = search.attempt(solution.actions, least=search.least)
    if isinstance(step, StepError):
        return ""
    limits, size = search.limits, step.compiled.total_bytes
    if size > limits.room or step.compiled.host_bytes > limits.host_room:
        return ""
    return f"; compressing {names} would have met it, with {show_bytes(size)}: {ASK}"


def would_save(search: Search, best: Trial, wider: Callable[[], Profile]) -> tuple[str, ...]:
    """A sentence about the time that compressing such values is predicted to spare against `best`,
    if it is worth a word.
    """
    found = _solved(search, wider)
    if found is None:
        return ()
    solution, names = found
    spared = best.cost.seconds - solution.seconds
    if spared <= LEAST_GAIN * search.profile.step_seconds:
        return ()
    return (f"compressing {names} is predicted to spare {spared * 1e3:.2f} ms a step; {ASK}",)


def _solved(search: Search, wider: Callable[[], Profile]) -> tuple[Solution, str] | None:
    """The fastest assignment with codecs for all values, and the values that it compresses and the
    search could not, in words; None where nothing fits, or there are none.
    """
    if not _lossless(search.profile):
        return None
    problem = dataclasses.replace(search.problem(search.model()), profile=wider())
    solution = fastest(problem)
    if solution is None:
        return None
    names = {
        name
        for label, choices in solution.actions.items()
        for name, choice in choices.items()
        if choice.action.compresses and (label, name) in _lossless(search.profile)
    }
    return (
        (solution, f"{', '.join(map(repr, sorted(names)))}, which checkpoint_name names,")
        if names
        else None
    )


def _lossless(profile: Profile) -> set[tuple[str, str]]:
    """Labels and names of the tags that no codec of the profile compresses."""
    return {
        (block.name, tag.name)
        for block in profile.blocks
        for tag in block.tags
        if not any(o.choice.action.compresses for o in tag.options)
    }

"""Searches that compile nothing."""

import types
from typing import Any

from jaxmem._core.profile import Profile
from jaxmem._planner.search.estimates import Estimates
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.trial import Limits, Trial
from jaxmem._target.devices.target import Target


class NoEstimates(Estimates):
    """Liveness estimates without remaining seconds."""

    def learn(self, actions) -> bool:
        return False

    def estimate(self, actions, purpose="others") -> None:
        return None


def stub(target: str) -> Any:
    """Returns a stub of a step compiler for a target. It compiles nothing."""
    backend = types.SimpleNamespace(
        target=Target.parse(target), stops_at_buffers=False, parallel_compiles=1
    )
    return types.SimpleNamespace(backend=backend, seconds=0.0, compiles=0)


def search(
    profile: Profile, limits: Limits, baseline: Trial, plan_trials=(), compiler=None, **others
) -> Search:
    """Returns a search that compiled the baseline and `plan_trials`.

    compiler: the compiler of steps, with a backend; None means a stub for an H200.
    others: fields of `Search`.
    """
    compiler = stub("h200") if compiler is None else compiler
    history: Any = types.SimpleNamespace(
        remember=lambda step: None,
        recall_least=lambda key: None,
        remember_least=lambda key, actions: None,
    )
    found = Search(profile, limits, compiler, history, NoEstimates(compiler, profile), **others)
    found.baseline, found.plan_trials = baseline, [*plan_trials]
    return found

"""A linear model of the working bytes, or of the seconds, of an assignment. The model is fitted to
compiled steps: a reference, and a sum of corrections over the assignment's choices.

Working memory is the memory of a compiled step without its arguments and without the tensors that
it saves for the backward. A liveness estimate predicts working memory only roughly: XLA chooses
fusions and an order of operations that no formula of the profile contains. So compiles correct the
effect of each choice. The profile prices seconds in pieces; whole steps show the seconds that the
sum of the pieces leaves out.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxmem._core.actions import UNTAGGED, Actions
from jaxmem._core.profile import Profile
from jaxmem._planner.solve.cost import effective
from jaxmem._planner.solve.problem import Key, keys_of
from jaxmem.errors import SolverError

# The least prior deviation of a correction, as a share of the largest deviation: a small tag may
# move a large buffer.
FLOOR = 1e-3
# Singular values below this share of the largest one come from plans that repeat other plans.
RANK = 1e-7


@dataclasses.dataclass(frozen=True)
class Additive:
    """Predicts a quantity: `reference` + the sum of `by_choice` over a plan's choices.

    Neither bytes nor seconds of a compile add up exactly: bytes are like a maximum over points of
    the schedule, and XLA fuses across pieces. So the model is refitted after every compile, and for
    a plan that was compiled the model returns the measured quantity.

    reference: the quantity, less the prior of its choices, of the first plan of the history that
      has choices.
    by_choice: the quantity that a choice adds to the reference, positive or negative: its prior and
      its correction. An absent choice adds nothing.
    profile: the profile of the step.
    observed: the measured quantity of each compiled plan, by the plan's choices.
    """

    reference: float
    by_choice: Mapping[Key, float]
    profile: Profile
    observed: Mapping[frozenset[Key], float]

    @staticmethod
    def fit(
        history: Sequence[tuple[Actions, float]], profile: Profile, prior: Mapping[Key, float] = {}
    ) -> "Additive":
        """Fits one correction for each (block, tag, choice) to the plans that were compiled.

        The fit is ridge regression in the limit without noise, since the numbers of a compiled
        program are exact. The prior deviation of a correction is proportional to the tag's bytes.
        If several sets of corrections reproduce the history, the fit returns the set of least norm
        in units of the deviations. If no set reproduces the history, the fit is the least-squares
        solution.

        `history`: plans and their measured quantity: working bytes (total less static less saved),
        or the seconds that the profile does not account for. Plans that keep everything have no
        choices to learn from, and are the reference only if there is no other plan. If a plan was
        measured twice, the larger measurement counts. `prior`: the quantity that each choice is
        expected to add; corrections are fitted to the rest. Raises SolverError if the history is
        empty, or has a number that is not finite.
        """
        observed: dict[frozenset[Key], float] = {}
        for actions, size in history:
            if not np.isfinite(size):
                raise SolverError(f"Additive.fit: `history` has {size}; expected a finite number")
            key = _keys(profile, actions)
            observed[key] = max(size, observed.get(key, size))
        if not observed:
            raise SolverError(
                "Additive.fit: `history` is empty; expected at least one compiled plan"
            )
        rest = {k: v - sum(prior.get(c, 0.0) for c in k) for k, v in observed.items()}
        with_choices = {k: v for k, v in rest.items() if UNTAGGED not in {tag for _, tag, _ in k}}
        rows = with_choices or rest
        # Corrections are differences from the first plan, so that the choices of the first plan
        # need no correction.
        (base, reference), *others = rows.items()
        keys = sorted(set().union(*(k for k, _ in others)) - base)
        if not keys:
            return Additive(reference, dict(prior), profile, observed)
        deviation = _deviations(profile, keys)
        # One row per plan and one column per choice: 1 if the plan takes the choice. Each column is
        # scaled by its deviation, so that lstsq's solution of least norm is the least in units of
        # deviations. The product with the deviations undoes the scaling.
        design = np.array([[key in row for key in keys] for row, _ in others], float) * deviation
        change = np.array([size - reference for _, size in others])
        fitted = (deviation * np.linalg.lstsq(design, change, rcond=RANK)[0]).tolist()
        corrections = {key: prior.get(key, 0.0) + more for key, more in zip(keys, fitted)}
        return Additive(reference, {**prior, **corrections}, profile, observed)

    def predict(self, actions: Actions) -> float:
        """The quantity of a plan: the measured quantity if the plan was compiled, else the fitted
        sum. Raises TagError as `evaluate` does.
        """
        keys = _keys(self.profile, actions)
        if keys in self.observed:
            return self.observed[keys]
        return self.reference + sum(self.by_choice.get(k, 0.0) for k in keys)


def _keys(profile: Profile, actions: Actions) -> frozenset[Key]:
    """The key of a plan: its effective choices, since the other choices change no byte."""
    return frozenset(keys_of(effective(profile, actions)))


def _deviations(profile: Profile, keys: Sequence[Key]) -> np.ndarray:
    """Prior deviations of the corrections, up to a common factor, aligned with `keys`. A deviation
    is the bytes of the tag's tensor, the largest if block classes of one label differ.
    """
    sizes: dict[tuple[str, str], int] = {}
    for block in profile.blocks:
        for tag in block.tags:
            sizes[block.name, tag.name] = max(
                block.tag_bytes(tag.name), sizes.get((block.name, tag.name), 0)
            )
    size = np.array([sizes.get(k[:2], 0) for k in keys], float)
    return np.maximum(size, FLOOR * max(size.max(), 1.0))

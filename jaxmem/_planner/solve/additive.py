"""What whole steps taught of an assignment's bytes or seconds: a number, and a sum over choices.

Working memory is what a compiled step takes besides its arguments and what it saves: no formula
gives it, and only compiles tell how a choice changes it. Seconds are priced by the profile, but in
pieces, and whole steps tell what their sum leaves out.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxmem._core.actions import REST, Actions
from jaxmem._core.profile import Profile
from jaxmem._planner.solve.cost import effective
from jaxmem._planner.solve.problem import Key
from jaxmem.errors import SolverError

# The least prior deviation of a correction, against the largest: a small tag may move a large
# buffer.
FLOOR = 1e-3
RANK = 1e-7  # singular values below this, against the largest, are repetitions of other plans


@dataclasses.dataclass(frozen=True)
class Additive:
    """Predicts a quantity: `reference` + the sum of `by_choice` over a plan's choices.

    Neither bytes nor seconds of a compile add up exactly: the first are like a maximum over
    moments, and XLA fuses across pieces. So the model is refitted after every compile, and a plan
    that was compiled is predicted as it was measured.

    reference: the quantity of the first plan of the history that has choices.
    by_choice: what a choice adds to the reference, of either sign; one that is not here adds
      nothing.
    profile: the step that the plans are of.
    observed: what was measured, by a plan's choices.
    """

    reference: float
    by_choice: Mapping[Key, float]
    profile: Profile
    observed: Mapping[frozenset[Key], float]

    @staticmethod
    def fit(history: Sequence[tuple[Actions, float]], profile: Profile) -> "Additive":
        """Fits one correction for each (block, tag, choice) to the plans that were compiled.

        This is ridge regression whose prior deviation is in proportion to the tag's bytes, in the
        limit without noise, since what is read of a compiled program is exact. Of all corrections
        that give the history it takes those least in units of their deviations; where no sum can
        give it, the nearest in squares.

        `history`: plans and what was measured of each: working bytes (total less static less
        saved), or the seconds that the profile does not account for. Plans that keep everything
        have no choices to learn from, and serve as reference only if there is no other. Of one plan
        measured twice, the larger counts. Raises SolverError if there is no history, or a number
        that is not finite.
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
        with_choices = {
            k: v for k, v in observed.items() if not any(tag == REST for _, tag, _ in k)
        }
        rows = with_choices or observed
        # Corrections are differences from the first plan, so that its own choices need none.
        (base, reference), *others = rows.items()
        keys = sorted(set().union(*(k for k, _ in others)) - base)
        if not keys:
            return Additive(reference, {}, profile, observed)
        deviation = _deviations(profile, keys)
        # A row a plan, a column a choice: 1 where the plan takes it. In columns scaled by their
        # deviations, lstsq's solution of least norm is the least in units of deviations, and the
        # product with the deviations undoes that.
        design = np.array([[key in row for key in keys] for row, _ in others], float) * deviation
        change = np.array([size - reference for _, size in others])
        corrections = deviation * np.linalg.lstsq(design, change, rcond=RANK)[0]
        return Additive(reference, dict(zip(keys, corrections.tolist())), profile, observed)

    def predict(self, actions: Actions) -> float:
        """The quantity of a plan: as measured if it was, else by the fitted sum. Raises TagError
        as `evaluate`.
        """
        keys = _keys(self.profile, actions)
        if keys in self.observed:
            return self.observed[keys]
        return self.reference + sum(self.by_choice.get(k, 0.0) for k in keys)


def _keys(profile: Profile, actions: Actions) -> frozenset[Key]:
    """What a plan is known by: its effective choices, since the others change no byte."""
    return frozenset(
        (b, t, c) for b, tags in effective(profile, actions).items() for t, c in tags.items()
    )


def _deviations(profile: Profile, keys: Sequence[Key]) -> np.ndarray:
    """Prior deviations of the corrections, up to a factor, aligned with `keys`: the bytes of each
    tag's tensor, the largest where classes of one label differ.
    """
    sizes: dict[tuple[str, str], int] = {}
    for block in profile.blocks:
        for tag in block.tags:
            sizes[block.name, tag.name] = max(
                block.tag_bytes(tag.name), sizes.get((block.name, tag.name), 0)
            )
    size = np.array([sizes.get(k[:2], 0) for k in keys], float)
    return np.maximum(size, FLOOR * max(size.max(), 1.0))

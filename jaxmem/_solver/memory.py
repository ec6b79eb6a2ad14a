"""A model of working memory (of the head, and of one block), learned from compiles.

Saved bytes follow from a plan exactly. Working memory is what a compiled step takes besides these
and its arguments: no formula gives it, and only compiles tell how a choice changes it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxmem._core.actions import RECOMPUTE, REST, Actions
from jaxmem._core.profile import Profile
from jaxmem._solver.cost import effective
from jaxmem._solver.problem import Key
from jaxmem.errors import SolverError

# The least prior deviation of a correction, against the largest: a small tag may move a large
# buffer.
FLOOR = 1e-3
# The share of a recomputed tensor's bytes that is expected as working memory, since recomputed
# tensors live together for a while. Over the plans of benchmarks/time_rank, the error of a
# prediction from everything kept falls from 4.5 to 2.6 % of the step at the median.
REPEATED = 1 / 3
RANK = 1e-7  # singular values below this, against the largest, are repetitions of other plans


@dataclasses.dataclass(frozen=True)
class MemoryModel:
    """Predicts working bytes: `reference` + the sum of `working` over a plan's choices.

    Bytes of a compile are like a maximum over moments, so they do not add up exactly: the model is
    refitted after every compile, and a plan that was compiled is predicted as it was measured.

    reference: working bytes of the first plan of the history that has choices.
    working: what a choice adds to the reference, of either sign; one that is not here adds nothing.
    profile: the step that the plans are of.
    observed: measured working bytes, by a plan's choices.
    """

    reference: float
    working: Mapping[Key, float]
    profile: Profile
    observed: Mapping[frozenset[Key], float]

    @staticmethod
    def fit(history: Sequence[tuple[Actions, float]], profile: Profile) -> "MemoryModel":
        """Fits one correction for each (block, tag, choice) to the plans that were compiled.

        This is ridge regression whose prior deviation is in proportion to the tag's bytes, in the
        limit without noise, since compiled bytes are exact. Of all corrections that give the
        history it takes those least in units of their deviations; where no sum can give it, the
        nearest in squares.

        `history`: plans and their measured working bytes (total less static less saved). Plans
        that keep everything have no choices to learn from, and serve as reference only if there is
        no other. Of one plan measured twice, the larger counts. Raises SolverError if there is no
        history, or bytes that are not finite.
        """
        observed: dict[frozenset[Key], float] = {}
        for actions, size in history:
            if not np.isfinite(size):
                raise SolverError(
                    f"MemoryModel.fit: `history` has working bytes {size}; expected a finite number"
                )
            key = _keys(profile, actions)
            observed[key] = max(size, observed.get(key, size))
        if not observed:
            raise SolverError(
                "MemoryModel.fit: `history` is empty; expected at least one compiled plan"
            )
        with_choices = {
            k: v for k, v in observed.items() if not any(tag == REST for _, tag, _ in k)
        }
        rows = with_choices or observed
        # Corrections are differences from the first plan, so that its own choices need none.
        (base, reference), *others = rows.items()
        keys = sorted(set().union(*(k for k, _ in others)) - base)
        if not keys:
            return MemoryModel(reference, {}, profile, observed)
        deviation = _deviations(profile, keys)
        # A row a plan, a column a choice: 1 where the plan takes it. In columns scaled by their
        # deviations, lstsq's solution of least norm is the least in units of deviations, and the
        # product with the deviations turns it into bytes again.
        design = np.array([[key in row for key in keys] for row, _ in others], float) * deviation
        change = np.array([size - reference for _, size in others])
        corrections = deviation * np.linalg.lstsq(design, change, rcond=RANK)[0]
        return MemoryModel(reference, dict(zip(keys, corrections.tolist())), profile, observed)

    def predict(self, actions: Actions) -> float:
        """Working bytes of a plan: as measured if it was, else by the fitted sum. Raises TagError
        as `evaluate`.
        """
        keys = _keys(self.profile, actions)
        if keys in self.observed:
            return self.observed[keys]
        return self.reference + sum(self.working.get(k, 0.0) for k in keys)


def _keys(profile: Profile, actions: Actions) -> frozenset[Key]:
    """What a plan is known by: its effective choices, since the others change no byte."""
    return frozenset(
        (b, t, c) for b, tags in effective(profile, actions).items() for t, c in tags.items()
    )


def _deviations(profile: Profile, keys: Sequence[Key]) -> np.ndarray:
    """Prior deviations of the corrections, in bytes, aligned with `keys`: the bytes of each tag's
    tensor, the largest where classes of one label differ.
    """
    sizes: dict[tuple[str, str], int] = {}
    for block in profile.blocks:
        for tag in block.tags:
            sizes[block.name, tag.name] = max(
                block.tag_bytes(tag.name), sizes.get((block.name, tag.name), 0)
            )
    size = np.array([sizes.get(k[:2], 0) for k in keys], float)
    return np.maximum(size, FLOOR * max(size.max(), 1.0))


@dataclasses.dataclass(frozen=True)
class Expected:
    """Working bytes of a plan: what is known of recomputation beforehand, and what compiles taught
    on top.

    fitted: the model of what the prior leaves unexplained.
    prior: bytes by choice, from `prior_bytes`.
    """

    fitted: MemoryModel
    prior: Mapping[Key, float]

    @staticmethod
    def fit(history: Sequence[tuple[Actions, float]], profile: Profile) -> "Expected":
        """Fits a MemoryModel to what the prior leaves of each plan's measured working bytes."""
        prior = prior_bytes(profile)
        rest = [(actions, size - _sum(profile, prior, actions)) for actions, size in history]
        return Expected(MemoryModel.fit(rest, profile), prior)

    @property
    def reference(self) -> float:
        """Working bytes, less their prior, of the plan that corrections are counted from."""
        return self.fitted.reference

    @property
    def working(self) -> dict[Key, int]:
        """Bytes that each (block, tag, choice) adds to the reference, as the solver counts them."""
        learned = self.fitted.working
        keys = learned.keys() | self.prior.keys()
        sums = {k: learned.get(k, 0.0) + self.prior.get(k, 0.0) for k in sorted(keys)}
        return _in_whole_units(self.fitted.profile, sums)

    def predict(self, actions: Actions) -> float:
        """Working bytes of a plan: as measured if it was compiled, else by the fitted sum."""
        return self.fitted.predict(actions) + _sum(self.fitted.profile, self.prior, actions)


def prior_bytes(profile: Profile) -> dict[Key, int]:
    """Bytes that each recomputed tag is expected to add to the working memory of its block's
    backward, before any compile has told.
    """
    sizes = {
        (b.name, t.name, RECOMPUTE): b.tag_bytes(t.name) for b in profile.blocks for t in b.tags
    }
    return _in_whole_units(profile, {key: REPEATED * size for key, size in sizes.items()})


def _in_whole_units(profile: Profile, sizes: Mapping[Key, float]) -> dict[Key, int]:
    """Rounds to multiples of the gcd of all savable sizes, so that the solver can keep counting in
    whole units of it.
    """
    options = [o.device_bytes * b.layers for b in profile.blocks for t in b.tags for o in t.options]
    inputs = [b.layers * b.values[v] for b in profile.blocks for v in b.inputs]
    unit = math.gcd(*options, *inputs) or 1
    return {key: unit * round(size / unit) for key, size in sizes.items()}


def _sum(profile: Profile, by_choice: Mapping[Key, float], actions: Actions) -> float:
    chosen = effective(profile, actions)
    return sum(by_choice.get((b, t, c), 0.0) for b, tags in chosen.items() for t, c in tags.items())

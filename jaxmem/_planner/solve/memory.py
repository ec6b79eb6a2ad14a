"""A model of working memory (of the head, and of one block): what is expected beforehand, and what
compiles taught. Saved bytes follow from a plan exactly.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxmem._core.actions import RECOMPUTE, Actions
from jaxmem._core.profile import Profile
from jaxmem._planner.solve.additive import Additive
from jaxmem._planner.solve.cost import effective
from jaxmem._planner.solve.problem import Key

# The share of a recomputed tensor's bytes that is expected as working memory, since recomputed
# tensors live together for a while. Over the plans of the result time_rank, the error of a
# prediction from everything kept falls from 4.5 to 2.6 % of the step at the median.
REPEATED = 1 / 3


@dataclasses.dataclass(frozen=True)
class Expected:
    """Working bytes of a plan: what is known of recomputation beforehand, and what compiles taught
    on top.

    fitted: the model of what the prior leaves unexplained.
    prior: bytes by choice, from `prior_bytes`.
    """

    fitted: Additive
    prior: Mapping[Key, float]

    @staticmethod
    def fit(history: Sequence[tuple[Actions, float]], profile: Profile) -> "Expected":
        """Fits an additive model to what the prior leaves of each plan's measured working bytes."""
        prior = prior_bytes(profile)
        rest = [(actions, size - _sum(profile, prior, actions)) for actions, size in history]
        return Expected(Additive.fit(rest, profile), prior)

    @property
    def reference(self) -> float:
        """Working bytes, less their prior, of the plan that corrections are counted from."""
        return self.fitted.reference

    @property
    def working(self) -> dict[Key, int]:
        """Bytes that each (block, tag, choice) adds to the reference, as the solver counts them."""
        learned = self.fitted.by_choice
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

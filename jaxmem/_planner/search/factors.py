"""Factors of a profile's prices: the ratios between seconds in whole steps and seconds of pieces,
for recomputation, for keeping and for codecs.

Whole steps correct the prices of their pieces by three factors. The factors are fitted to the steps
that `measure=` ran, with a prior of 1. The alternative is a factor for each segment, which would
have more unknowns than there are runs.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxmem._core.profile import BlockClass, Option, Profile
from jaxmem._planner.search.history import Comparison
from jaxmem._planner.solve.cost import Cost

LEAST_FACTOR, MOST_FACTOR = 1 / 4, 4.0  # a factor outside this range is not an error of prices
PRIOR = 0.3  # the prior standard deviation of a factor from 1
NOISE = 0.01  # the noise of measured seconds, as a share of a step's seconds


@dataclasses.dataclass(frozen=True)
class Factors:
    """The factors by which the profile's seconds are multiplied.

    recompute: the factor of repeating equations.
    keep: the factor of writing and reading a tensor without a codec.
    codec: the factor of encoding, decoding, and keeping codes.
    """

    recompute: float = 1.0
    keep: float = 1.0
    codec: float = 1.0

    def __str__(self) -> str:
        """A phrase such as "recomputing took 2 times as long"; "nothing differed" if all factors
        are 1.
        """
        factors = {"recomputing": self.recompute, "keeping": self.keep, "codecs": self.codec}
        phrases = [f"{what} took {f:.3g} times as long" for what, f in factors.items() if f != 1]
        return " and ".join(phrases) or "nothing differed"


def rescaled(profile: Profile, factors: Factors) -> Profile:
    """The profile with its prices multiplied by the factors."""
    blocks = tuple(_block(block, factors) for block in profile.blocks)
    return dataclasses.replace(profile, blocks=blocks)


def fitted(observed: Sequence[Comparison[Cost]]) -> Factors:
    """The factors for which the profile's prices are nearest to measured differences, by least
    squares, with a prior of 1 ± `PRIOR` for every factor.
    """
    rows, wanted = [], []
    for one in observed:
        parts = _parts(one.first) - _parts(one.other)
        rows.append(parts / one.noise)
        transfers = one.first.host_seconds - one.other.host_seconds  # which no factor corrects
        wanted.append((one.seconds - parts.sum() - transfers) / one.noise)
    rows += list(np.eye(3) / PRIOR)
    wanted += [0.0] * 3
    off = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0]
    return Factors(*(float(f) for f in np.clip(1 + off, LEAST_FACTOR, MOST_FACTOR)))


def _parts(cost: Cost) -> np.ndarray:
    """Seconds of recomputing, of keeping, and of codecs, without host transfers."""
    recompute, codec = cost.recompute_seconds, cost.codec_seconds
    return np.array([recompute, cost.seconds - recompute - codec - cost.host_seconds, codec])


def _scaled(option: Option, factors: Factors) -> Option:
    """The option with its seconds multiplied by a factor, but for its host transfers."""
    factor = factors.codec if option.choice.action.encodes else factors.keep
    seconds = option.host_seconds + factor * (option.seconds - option.host_seconds)
    return dataclasses.replace(option, seconds=seconds)


def _block(block: BlockClass, factors: Factors) -> BlockClass:
    return dataclasses.replace(
        block,
        equations=tuple(
            dataclasses.replace(e, seconds=factors.recompute * e.seconds) for e in block.equations
        ),
        tags=tuple(
            dataclasses.replace(tag, options=tuple(_scaled(o, factors) for o in tag.options))
            for tag in block.tags
        ),
        input_seconds=tuple(factors.keep * s for s in block.input_seconds),
        rerun_seconds=None if (s := block.rerun_seconds) is None else factors.recompute * s,
        span_seconds=factors.recompute * block.span_seconds,
    )

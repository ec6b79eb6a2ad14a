"""Factors that runs of whole steps teach: planted ones are found again."""

import math

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxmem._core.actions import KEEP, OFFLOAD
from jaxmem._core.profile import Option
from jaxmem._planner.search.factors import LEAST_FACTOR, MOST_FACTOR, Factors, fitted, rescaled
from jaxmem._planner.solve.cost import evaluate
from tests.shared.profiles import INT4, INT4_OFFLOAD, block, copied, nested, open_to, profile
from tests.shared.profiles import profiles as drawn_profiles

FACTOR = st.floats(0.5, 2.0)
TAGS = {
    "u": [Option(KEEP, 10, 0, 0.1), Option(INT4, 3, 0, 0.4)],
    "v": [Option(KEEP, 20, 0, 0.7), Option(INT4, 6, 0, 0.5), copied(OFFLOAD, 20, 0.9)],
    "w": [Option(KEEP, 40, 0, 0.2), copied(INT4_OFFLOAD, 12, 0.3, 0.4)],
}
EQUATIONS = [
    ([0], [1], 1.0, None),
    ([1], [2], 0.0, "u"),
    ([2], [3], 2.0, None),
    ([3], [4], 0.0, "v"),
    ([4], [5], 0.0, "w"),
]
MADE = profile(block(EQUATIONS, [2, 4, 5], [5, 10, 10, 20, 20, 40], TAGS))
NOTHING, KEPT = {}, {"u": KEEP, "v": KEEP}
CODED = {"u": INT4, "v": INT4}


def of(made, tags):
    return evaluate(made, {"block": tags})


def observations(made, true, noise=1e-6):
    """What a clock says that runs pieces with the true factors."""
    real = rescaled(made, true)
    for tags in (KEPT, CODED, {"u": KEEP}, {"v": INT4}):
        seconds = of(real, tags).seconds - of(real, NOTHING).seconds
        yield (of(made, tags), of(made, NOTHING), seconds, noise)


@hypothesis.given(FACTOR, FACTOR, FACTOR)
def test_planted_factors_are_found(recompute, keep, codec):
    found = fitted(list(observations(MADE, Factors(recompute, keep, codec))))
    assert found.recompute == pytest.approx(recompute, rel=1e-3)
    assert found.keep == pytest.approx(keep, rel=1e-3)
    assert found.codec == pytest.approx(codec, rel=1e-3)


def test_what_was_not_run_is_not_corrected():
    assert fitted([]) == Factors()
    of_keeping = [o for o in observations(MADE, Factors(codec=2.0)) if o[0] == of(MADE, KEPT)]
    assert fitted(of_keeping).codec == pytest.approx(1.0)


def test_runs_that_tell_little_change_little():
    found = fitted(list(observations(MADE, Factors(recompute=3.0), noise=100.0)))
    assert found.recompute == pytest.approx(1.0, abs=0.01)


def test_absurd_differences_are_cut_off():
    absurd = [(of(MADE, KEPT), of(MADE, NOTHING), seconds, 1e-3) for seconds in (1e6, -1e6)]
    for one in absurd:
        factors = fitted([one])
        values = (factors.recompute, factors.keep, factors.codec)
        assert all(math.isfinite(f) and LEAST_FACTOR <= f <= MOST_FACTOR for f in values)


def test_a_codec_whose_codes_are_offloaded_teaches_the_factor_of_codecs():
    real = rescaled(MADE, Factors(codec=1.5))
    away, nothing = {"w": INT4_OFFLOAD}, {}
    seconds = of(real, away).seconds - of(real, nothing).seconds
    observed = [(of(MADE, away), of(MADE, nothing), seconds, 1e-6)]
    assert fitted(observed).codec == pytest.approx(1.5, rel=1e-3)


def test_no_factor_changes_the_seconds_of_copies():
    for tags in ({"v": OFFLOAD}, {"w": INT4_OFFLOAD}):
        before, after = of(MADE, tags), of(rescaled(MADE, Factors(1.0, 3.0, 2.0)), tags)
        assert after.host_seconds == before.host_seconds > 0
        coding = 0.4 if "w" in tags else 0.0
        assert after.seconds - before.seconds == pytest.approx(coding)


@hypothesis.given(drawn_profiles(), st.data())
def test_a_rescaled_profile_costs_the_same_where_nothing_is_rescaled(made, data):
    picked = {k: data.draw(st.sampled_from(c)) for k, c in open_to(made).items()}
    actions = nested(picked, made)
    cost = evaluate(made, actions)
    assert evaluate(rescaled(made, Factors()), actions) == cost
    doubled = evaluate(rescaled(made, Factors(2.0, 2.0, 2.0)), actions)
    assert doubled.recompute_seconds == pytest.approx(2 * cost.recompute_seconds)
    assert doubled.saved_bytes == cost.saved_bytes

"""How much a lossy codec must gain: more than the times are known to, and none by explicit wish."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jaxmem._core.actions import ALL, KEEP, Action, Choice
from jaxmem._core.assignment import Assignment
from jaxmem._core.database import Database, Timing
from jaxmem._core.profile import Option
from jaxmem._cost.profile.doubt import MIN_GAIN_REQUESTED, with_doubts
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import profile
from jaxmem._cost.profile.times import CEILING, ESTIMATED, job_times
from jaxmem._target.compile.protocol import Pricing
from jaxmem._target.devices.target import Target
from jaxmem._trace.job import Job
from jaxmem._trace.step import trace
from tests.shared import models
from tests.shared.profiles import block

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults, pytest.mark.todays_checkpoint]
LOSSY, BITS = (
    Choice("compress", codec)
    for codec in ("grouped_symmetric(group=64,scale=bfloat16)", "bit_mask()")
)
AWAY = Choice("compress_offload", LOSSY.codec)


def tagged(options, runs=1):
    chain = [([0], [1], 1.0, None), ([1], [2], 0.0, "u")]
    made = block(chain, [2], [5, 20, 20], {"u": [Option(c, 1, 0, s) for c, s in options]})
    return dataclasses.replace(made, runs=runs)


def doubts(blocks, *told) -> list[dict]:
    return [{o.choice: o.doubt for o in b.tags[0].options} for b in with_doubts(blocks, *told)]


def test_a_lossy_choice_is_doubted_by_its_own_seconds_and_a_share_of_the_step():
    (found,) = doubts([tagged([(KEEP, 3.0), (LOSSY, 2.0), (BITS, 2.0), (AWAY, 4.0)], 5)], 0.1, 100)
    seen = MIN_GAIN_REQUESTED * 100 / 5
    assert found == {
        KEEP: 0.0, LOSSY: pytest.approx(0.2 + seen), BITS: 0.0, AWAY: pytest.approx(0.4 + seen)
    }  # fmt: skip


def test_the_share_of_the_step_is_that_of_a_label():
    made = [tagged([(KEEP, 3.0), (LOSSY, 2.0)], runs) for runs in (1, 7)]
    assert sum(b.runs * found[LOSSY] for b, found in zip(made, doubts(made, 0.0, 50.0))) == (
        pytest.approx(MIN_GAIN_REQUESTED * 50.0)
    )


def test_what_is_asked_for_is_not_doubted():
    assert doubts([tagged([(LOSSY, 2.0), (AWAY, 4.0)])], 0.1, 100.0) == [{LOSSY: 0.0, AWAY: 0.0}]


class Told(Pricing):
    """A target whose pieces take what it is told, by how far their runs lie apart."""

    def __init__(self, source, spread=0.0, seconds=1e-3):
        super().__init__(Target.parse("local"))
        self.source, self.spread, self.seconds = source, spread, seconds

    def times(self, jobs):
        return [Timing(self.seconds, self.spread)] * len(jobs)


def profiled(backend, tmp_path, actions=ALL):
    build = models.build_with(functools.partial(models.scanned, block=models.narrow))
    shapes = jax.eval_shape(
        lambda: (models.parameters(2, 64, jnp.float32), models.batch(2, 64, 64, jnp.float32))
    )
    jaxpr = trace(build, Assignment.nothing(), shapes)[1].jaxpr
    return profile(jaxpr, backend, Allowed(actions), database=Database(tmp_path / "p.sqlite"))


@pytest.mark.parametrize(
    ("backend", "uncertainty"),
    [
        (Told("measured", 0.07), 0.07),
        (Told("measured", 0.6), 0.6),
        (Told("xla"), ESTIMATED),
        (Pricing(Target.parse("h200")), CEILING),
    ],
    ids=["quiet", "busy", "xla", "roofline"],
)
def test_times_are_as_uncertain_as_they_were_measured(backend, uncertainty, tmp_path):
    made = profiled(backend, tmp_path)
    assert made.uncertainty == pytest.approx(uncertainty)
    (block,) = made.blocks
    for tag in block.tags:
        for option in tag.options:
            lossy = option.choice.codec not in (None, BITS.codec)
            expected = (
                uncertainty * option.seconds + MIN_GAIN_REQUESTED * made.step_seconds / block.runs
            )
            assert option.doubt == pytest.approx(expected if lossy else 0.0)
    assert {bool(o.doubt) for t in block.tags for o in t.options} == {True, False}


def test_the_median_spread_counts(tmp_path):
    machine, spreads = Told("measured"), iter((0.1, 0.9, 0.2))
    machine.times = lambda jobs: [Timing(1.0, next(spreads)) for _ in jobs]
    jobs = [Job(lambda x: x * 2, (jax.ShapeDtypeStruct((n,), jnp.float32),)) for n in (3, 4, 5)]
    found = job_times(jobs, machine, Database(tmp_path / "p.sqlite"))
    assert found.uncertainty == pytest.approx(0.2)


def test_codecs_that_are_asked_for_alone_are_not_doubted_in_a_profile(tmp_path):
    made = profiled(Told("measured", 0.6), tmp_path, (Action.COMPRESS, Action.RECOMPUTE))
    options = [o for b in made.blocks for t in b.tags for o in t.options]
    assert options
    assert {o.doubt for o in options} == {0.0}

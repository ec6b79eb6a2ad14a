"""Times are measured once, and again where the machine was busy or they are old; the less disturbed
measurement is kept. A lossy codec must gain more than the times are known to, and nothing where it
is explicitly asked for.
"""

import dataclasses
import functools
import time

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
from jaxmem._cost.profile.times import (
    BUSY,
    CEILING,
    ESTIMATED,
    OLD_SECONDS,
    RETRY_SECONDS,
    job_times,
)
from jaxmem._target.compile.backend import Local
from jaxmem._target.compile.protocol import Pricing
from jaxmem._target.compile.timing import measure_all
from jaxmem._target.devices.target import Target
from jaxmem._trace.job import Job
from jaxmem._trace.step import trace
from tests.shared import models
from tests.shared.profiles import block

QUIET, DISTURBED = BUSY / 2, 2 * BUSY


def job(size: int) -> Job:
    return Job(lambda x: x * 2, (jax.ShapeDtypeStruct((size,), jnp.float32),))


class Machine(Pricing):
    """Measures what it is told to, and counts how often it was asked."""

    source = "measured"

    def __init__(self, seconds=1.0, spread=0.0):
        super().__init__(Target.parse("local"))
        self.asked, self.answer = [], Timing(seconds, spread)

    def times(self, jobs):
        self.asked.append(len(jobs))
        return [self.answer] * len(jobs)


class Estimates(Machine):
    source = "xla"


@pytest.fixture
def clock(monkeypatch):
    now = [1e9]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


@pytest.fixture
def measured(tmp_path, clock):
    """Answers with seconds, and how many jobs were measured for them, `later` than before."""
    machine, jobs = Machine(), [job(3), job(4), job(3)]

    def again(seconds: float, spread: float, later: float = 0.0, **how):
        clock[0] += later
        machine.asked, machine.answer = [], Timing(seconds, spread)
        found = job_times(jobs, machine, Database(tmp_path / "profile.sqlite", **how))
        assert len(found.seconds) == 3
        assert len(set(found.seconds)) == 1
        return found.seconds[0], sum(machine.asked), found.disturbed

    return again


def test_a_quiet_time_is_measured_once(measured):
    assert measured(5.0, QUIET) == (5.0, 2, 0.0)
    assert measured(9.0, QUIET) == (5.0, 0, 0.0)
    assert measured(9.0, QUIET, later=OLD_SECONDS - 1) == (5.0, 0, 0.0)


def test_a_busy_time_is_measured_again_after_a_while(measured):
    assert measured(5.0, DISTURBED) == (5.0, 2, 1.0)
    assert measured(4.0, QUIET, later=RETRY_SECONDS - 1) == (5.0, 0, 1.0)
    assert measured(4.0, QUIET, later=2) == (4.0, 2, 0.0)
    assert measured(3.0, QUIET, later=RETRY_SECONDS + 1) == (4.0, 0, 0.0)


def test_of_busy_times_the_least_is_kept_and_stays_doubtful(measured):
    assert measured(5.0, DISTURBED)[0] == 5.0
    assert measured(8.0, DISTURBED, later=RETRY_SECONDS + 1) == (5.0, 2, 1.0)
    assert measured(4.0, DISTURBED, later=RETRY_SECONDS + 1) == (4.0, 2, 1.0)
    assert measured(6.0, QUIET, later=RETRY_SECONDS + 1) == (6.0, 2, 0.0)


def test_an_old_time_is_measured_again(measured):
    assert measured(5.0, QUIET)[0] == 5.0
    assert measured(7.0, QUIET, later=OLD_SECONDS + 1) == (7.0, 2, 0.0), "the machine has changed"
    assert measured(9.0, DISTURBED, later=OLD_SECONDS + 1) == (7.0, 2, 1.0), "or was busy now"
    assert measured(9.0, QUIET, later=1) == (7.0, 0, 1.0)
    assert measured(8.0, QUIET, later=RETRY_SECONDS + 1) == (8.0, 2, 0.0)


def test_a_time_of_the_future_is_old(measured):
    assert measured(5.0, QUIET)[0] == 5.0
    assert measured(6.0, QUIET, later=-2 * OLD_SECONDS) == (6.0, 2, 0.0)


def test_what_is_not_to_be_read_is_measured_and_written_anew(measured, clock):
    assert measured(5.0, QUIET)[0] == 5.0
    start = clock[0] + 1
    assert measured(6.0, DISTURBED, later=1, since=start) == (6.0, 2, 1.0)
    assert measured(7.0, QUIET, later=1, since=start) == (6.0, 0, 1.0), "not within one plan"
    assert measured(7.0, QUIET, later=1)[0] == 6.0


def test_estimates_do_not_age(measured, monkeypatch):
    monkeypatch.setattr(Machine, "source", "xla")
    assert measured(5.0, 0.0)[0] == 5.0
    assert measured(6.0, 0.0, later=2 * OLD_SECONDS) == (5.0, 0, 0.0)


def test_a_machine_is_measured_with_the_spread_of_most_jobs(monkeypatch):
    rounds = iter([[2.0, 2.0, 2.2], [1.0, 1.3, 1.6], [4.0, 8.0, 9.0]])
    monkeypatch.setattr("jaxmem._target.compile.timing.measure", lambda _: next(rounds))
    found = measure_all([job(3), job(4), job(5)])
    assert [timing.seconds for timing in found] == [2.0, 1.0, 4.0]
    assert [timing.spread for timing in found] == pytest.approx([0.3, 0.3, 0.3])
    assert measure_all([]) == []


def test_the_machine_at_hand_is_measured(tmp_path, measured_times):
    backend = Local(Target.parse("local"))
    found = job_times([job(2**16), job(2**4)], backend, Database(tmp_path / "profile.sqlite"))
    assert found.source == "measured"
    assert all(0 < seconds < 60 for seconds in found.seconds)
    again = job_times([job(2**16)], backend, Database(tmp_path / "profile.sqlite"))
    assert again.seconds == found.seconds[:1]


LOSSY, BITS = (
    Choice("compress", codec)
    for codec in ("grouped_symmetric(group=64,scale=bfloat16)", "bit_mask()")
)


def tagged(options, runs=1):
    chain = [([0], [1], 1.0, None), ([1], [2], 0.0, "u")]
    made = block(chain, [2], [5, 20, 20], {"u": [Option(c, 1, 0, s) for c, s in options]})
    return dataclasses.replace(made, runs=runs)


def doubts(blocks, *told) -> list[dict]:
    return [{o.choice: o.doubt for o in b.tags[0].options} for b in with_doubts(blocks, *told)]


def test_the_share_of_the_step_is_that_of_a_label():
    made = [tagged([(KEEP, 3.0), (LOSSY, 2.0)], runs) for runs in (1, 7)]
    assert sum(b.runs * found[LOSSY] for b, found in zip(made, doubts(made, 0.0, 50.0))) == (
        pytest.approx(MIN_GAIN_REQUESTED * 50.0)
    )


def profiled(backend, tmp_path, actions=ALL):
    build = models.build_with(functools.partial(models.scanned, block=models.narrow))
    jaxpr = trace(build, Assignment.nothing(), models.shapes(2, 64, 2, 64))[1].jaxpr
    return profile(jaxpr, backend, Allowed(actions), database=Database(tmp_path / "p.sqlite"))


@pytest.mark.parametrize(
    ("backend", "uncertainty"),
    [
        (Machine(1e-3, 0.07), 0.07),
        (Machine(1e-3, 0.6), 0.6),
        (Estimates(1e-3), ESTIMATED),
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
    machine, spreads = Machine(), iter((0.1, 0.9, 0.2))
    machine.times = lambda jobs: [Timing(1.0, next(spreads)) for _ in jobs]
    jobs = [Job(lambda x: x * 2, (jax.ShapeDtypeStruct((n,), jnp.float32),)) for n in (3, 4, 5)]
    found = job_times(jobs, machine, Database(tmp_path / "p.sqlite"))
    assert found.uncertainty == pytest.approx(0.2)


def test_codecs_that_are_asked_for_alone_are_not_doubted_in_a_profile(tmp_path):
    made = profiled(Machine(1e-3, 0.6), tmp_path, (Action.COMPRESS, Action.RECOMPUTE))
    options = [o for b in made.blocks for t in b.tags for o in t.options]
    assert options
    assert {o.doubt for o in options} == {0.0}

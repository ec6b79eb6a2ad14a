"""What processes tell one another, here threads that share a coordinator of this process."""

import concurrent.futures
import functools
import time

import pytest

from jaxmem._target.processes import channel as module
from jaxmem._target.processes.channel import joined
from jaxmem._target.processes.pace import Pace
from jaxmem._target.processes.signals import StopRequest
from jaxmem._train.runs.positions import Data
from jaxmem.errors import RunError
from tests.shared.processes import Coordinator, together
from tests.shared.training import Numbers

pytestmark = pytest.mark.core


def test_all_get_what_each_found():
    def work(channel):
        first = channel.agreed(lambda: {"number": channel.index})
        return first, channel.agreed(lambda: None), channel.first_does(lambda: channel.index + 7)

    want = [{"number": n} for n in range(3)], [None] * 3, 7
    assert together(3, work) == [want] * 3


def test_each_gets_what_it_found_itself_of_any_type():
    assert together(3, lambda channel: channel.each(lambda: {channel.index})) == [{0}, {1}, {2}]


def test_one_that_is_alone_asks_nobody():
    channel = joined()
    assert channel.alone
    assert channel.first
    assert channel.agreed(lambda: {1, 2}) == [{1, 2}], "of any type"
    with pytest.raises(ValueError, match="as it is"):
        channel.first_does(lambda: (_ for _ in ()).throw(ValueError("as it is")))
    channel.leave(ValueError())


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("at", [1, 2])
def test_an_error_of_one_is_told_to_all(failing, at):
    def work(channel):
        def found(number):
            if (channel.index, number) == (failing, at):
                raise OSError("no space")

        for number in (1, 2, 3):
            channel.agreed(lambda number=number: found(number))

    began = time.monotonic()
    for number, error in enumerate(together(3, work)):
        if number == failing:
            assert isinstance(error, OSError)
        else:
            assert isinstance(error, RunError)
            assert str(error) == f"process {failing} of 3 failed: no space"
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("leaving", [0, 1])
def test_one_that_leaves_between_messages_is_heard_of_at_the_next(leaving):
    def work(channel):
        channel.agreed(lambda: 1)
        if channel.index == leaving:
            channel.leave(KeyboardInterrupt())
            return "left"
        return channel.agreed(lambda: 2)

    found = together(2, work)
    assert found[leaving] == "left"
    assert str(found[1 - leaving]) == f"process {leaving} of 2 failed: KeyboardInterrupt"


def test_one_that_never_answers_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(module, "_SLICE", 0.01)
    monkeypatch.setattr(module, "HURRIED", 0.05)

    def work(channel):
        channel.hurry()
        return channel.agreed(lambda: 1) if channel.first else None

    found, _ = together(2, work)
    assert "process 1 of 2 does not answer" in str(found)


def test_messages_that_were_read_are_removed():
    coordinator = Coordinator()
    together(2, lambda channel: [channel.agreed(lambda: 1) for _ in range(9)], coordinator)
    assert {key.split("/")[1] for key in coordinator.values} == {"9"}


def test_another_thread_has_a_channel_of_its_own():
    coordinator = Coordinator()

    def work(channel):
        beside = channel.beside("writing")
        order = [channel, beside] if channel.first else [beside, channel]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            told = [pool.submit(one.agreed, lambda one=one: one.name) for one in order]
            return sorted(future.result()[0] for future in told)

    assert together(2, work, coordinator) == [["a run", "a run/writing"]] * 2


def test_each_process_goes_on_where_its_own_data_were():
    numbers = functools.partial(Numbers, batch=lambda number: number)
    at = lambda channel, step: Data(numbers(step * channel.index), channel).position
    apart, alike = (together(2, functools.partial(at, step=step)) for step in (100, 0))
    assert apart == [{"each": [{"json": {"at": 0}}, {"json": {"at": 100}}]}] * 2
    assert alike == [{"json": {"at": 0}}] * 2

    def work(channel, position):
        data = Data(numbers(7), channel)
        data.go(position)
        return data(1)

    assert together(2, lambda channel: work(channel, apart[0])) == [1, 101]
    assert together(3, lambda channel: work(channel, alike[0])) == [1, 1, 1]
    (error,) = together(1, lambda channel: work(channel, apart[0]))
    assert "positions of data in 2 processes, and there are 1" in str(error)


class Clock:
    """A process's own."""

    now = 0.0

    def __call__(self):
        return self.now


def paced(count, steps, seconds, save_every, signals=lambda index, step: None):
    """Of each process: the step after which it ended, where it saved, and how often it agreed."""

    def work(channel):
        asked, asks, clock = StopRequest(), [], Clock()
        agreed = channel.agreed
        channel.agreed = lambda work: asks.append(1) or agreed(work)
        pace = Pace(channel, asked, save_every, clock)
        pace.agree(0)
        done, saved = 0, []
        while done < steps and pace.ended is None:
            done += 1
            clock.now += seconds(channel.index, done)
            asked.number = signals(channel.index, done) or asked.number
            if pace.due(done):
                saved.append(done)
                pace.saved()
        return done, saved, len(asks), pace.ended

    return together(count, work)


def test_all_save_after_the_same_steps_by_the_first_ones_clock():
    """Though the others' clocks go otherwise."""
    found = paced(3, 400, lambda index, _: 0.1 * (1 + 3 * index), save_every=5)
    assert found == [found[0]] * 3
    done, saved, asks, _ = found[0]
    assert done == 400
    assert 5 <= len(saved) <= 9
    assert 30 <= asks <= 60, "about once a second"


@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_one_ends_all_after_the_same_step(who):
    found = paced(
        2, 400, lambda *_: 0.1, 5, lambda index, step: 15 if (index, step) == (who, 100) else None
    )
    assert found == [found[0]] * 2
    done, _, _, ended = found[0]
    assert ended == 15
    assert 100 <= done <= 111


def test_steps_that_begin_to_take_longer_are_not_many_until_all_agree():
    found = paced(
        2,
        300,
        lambda _, step: 0.001 if step < 150 else 10.0,
        1e6,
        lambda index, step: 2 if (index, step) == (1, 151) else None,
    )
    assert found == [found[0]] * 2
    assert 151 <= found[0][0] <= 251


def test_one_that_is_alone_is_asked_after_each_step():
    assert paced(1, 5, lambda *_: 1.0, 2) == [(5, [2, 4], 1, None)]
    assert paced(1, 5, lambda *_: 1.0, 9, lambda _, step: 2 if step == 3 else None)[0][0] == 3


def test_a_run_that_went_back_agrees_at_steps_that_it_comes_by_again():
    def work(channel):
        pace = Pace(channel, asked := StopRequest(), 1e6)
        pace.agree(0)
        for step in range(1, 200):
            pace.due(step)
        asked.number = 15 if channel.index else None
        return pace.due(5), pace.ended

    assert together(2, work) == [(False, 15)] * 2

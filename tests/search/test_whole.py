"""The end of a search, where what was known by its buffers is compiled whole.

No compiler is asked.
"""

import dataclasses

import pytest

import jaxmem._planner.search.search as search_module
from jaxmem._core.actions import KEEP
from jaxmem._core.profile import Option
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.trial import Limits, Trial
from jaxmem._planner.solve.cost import evaluate
from tests.search.test_whole_steps import STATIC, Steps
from tests.shared import searches
from tests.shared.profiles import block, profile

pytestmark = pytest.mark.core

BYTES = {"u": 40, "v": 39, "w": 10}  # of each tensor, the dearest to make first


class Whole(Steps):
    """Compiled whole, every step takes `more` bytes than its buffers."""

    def __init__(self, made, more):
        super().__init__(made, {})
        self.more, self.proved = more, []

    def compile_fully(self, step):
        self.proved.append([*step.actions["block"]])
        total = step.compiled.total_bytes + self.more
        compiled = dataclasses.replace(step.compiled, total_bytes=total)
        return dataclasses.replace(step, compiled=compiled)


def settled(more, room, monkeypatch):
    """What a search ends with that found how to keep any one of the tensors."""
    equations, options = [], {}
    for i, (name, seconds) in enumerate(zip(BYTES, (9.0, 8.0, 1.0))):
        equations += [([0], [2 * i + 1], seconds, None), ([2 * i + 1], [2 * i + 2], 0.0, name)]
        options[name] = [Option(KEEP, BYTES[name], 0, 0.0)]
    sizes = [0, *(size for name in BYTES for size in (BYTES[name],) * 2)]
    made = profile(block(equations, [2, 4, 6], sizes, options))
    steps = Whole(made, more)
    trial = lambda actions: Trial(steps.step(actions), evaluate(made, actions), 0)
    limits = Limits(room, room, 0)
    tried = [trial({"block": {name: KEEP}}) for name in BYTES]
    search = searches.search(
        made, limits, trial({"block": dict.fromkeys(BYTES, KEEP)}), tried, steps
    )
    monkeypatch.setattr(Search, "compiles_left", 0)
    monkeypatch.setattr(search_module, "begin", lambda search, arguments: None)
    monkeypatch.setattr(search_module, "refine_by_whole_steps", lambda search: {})
    search_module.find_plan(search, STATIC)
    best = None if search.best is None else [*search.best.actions["block"]]
    return best, steps.proved


def test_what_fits_whole_is_returned_after_one_compile(monkeypatch):
    assert settled(0, STATIC + 40, monkeypatch) == (["u"], [["u"]])


def test_what_is_as_near_to_the_room_as_one_that_did_not_fit_is_not_compiled(monkeypatch):
    """Each would cost a whole compile. What has room for as much more is, though it is slower."""
    assert settled(3, STATIC + 41, monkeypatch) == (["w"], [["u"], ["w"]])


def test_it_is_compiled_where_nothing_else_is_left(monkeypatch):
    best, proved = settled(35, STATIC + 41, monkeypatch)
    assert best is None
    assert sorted(proved) == [["u"], ["v"], ["w"]]


def test_what_takes_less_compiled_whole_than_its_buffers_is_not_refused(monkeypatch):
    """The nearest to the room is asked first, and nothing that exceeds it by far."""
    monkeypatch.setattr(search_module, "compile_least", lambda search: None)
    smallest = STATIC + BYTES["w"]
    assert settled(-1, smallest - 1, monkeypatch) == (["w"], [["w"]])
    best, proved = settled(-30, smallest - 2, monkeypatch)
    assert (best, proved) == (["w"], [["w"]])
    best, proved = settled(-1, smallest - 2, monkeypatch)
    assert best is None
    assert proved == [["w"], ["v"], ["u"]]
    best, proved = settled(0, int(0.94 * smallest), monkeypatch)
    assert (best, proved) == (None, [])

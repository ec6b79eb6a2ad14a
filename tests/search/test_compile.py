"""Compiles that are begun before they are asked for."""

import concurrent.futures
from typing import Any

import pytest

from jaxmem._core.actions import KEEP, UNTAGGED
from jaxmem._planner.search.compile import CompiledStep, StepCompiler
from jaxmem._target.devices.target import Target
from jaxmem.errors import StepError
from tests.shared import models

pytestmark = pytest.mark.jax_defaults
KEPT, NOTHING = {"block": {UNTAGGED: KEEP}}, {"block": {}}
ARGS, build = models.shapes(), models.build_with(models.scanned)


class Counting:
    """A backend that counts what it is asked to compile, and fails where it is told to."""

    def __init__(self, fails: bool = False):
        self.fails, self.asked = fails, 0

    stops_at_buffers, target = False, Target.parse("local")

    def compile_buffers(self, stage, traced):
        self.asked += 1
        future: Any = concurrent.futures.Future()
        if self.fails:
            future.set_exception(StepError("XLA refuses"))
        else:
            future.set_result(None)  # what was read of a compile, which these tests do not read
        return future


def test_what_was_begun_is_compiled_once_and_counted_once():
    backend: Any = Counting()
    steps = StepCompiler(build, ARGS, backend)
    steps.start(KEPT)
    assert (backend.asked, steps.compiles) == (1, 0)
    kept, _ = steps.try_compile_buffers(KEPT, NOTHING)
    assert (backend.asked, steps.compiles) == (2, 2)
    assert isinstance(kept, CompiledStep)
    assert kept.actions == KEPT
    steps.try_compile_buffers(KEPT)
    assert (backend.asked, steps.compiles) == (3, 3), "it is compiled anew when asked for again"


def test_a_compile_that_was_begun_and_failed_tells_so_when_it_is_asked_for():
    backend: Any = Counting(fails=True)
    steps = StepCompiler(build, ARGS, backend)
    steps.start(KEPT)
    (found,) = steps.try_compile_buffers(KEPT)
    assert isinstance(found, StepError)

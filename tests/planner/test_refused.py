"""A plan that XLA does not compile is left out of the search; the step itself has to compile."""

import concurrent.futures

import pytest

import jaxmem
from jaxmem._planner.search.history import History
from jaxmem._target.compile.backend import Local
from jaxmem.errors import StepError
from tests.shared import models
from tests.shared.marks import slow

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("own_database")]
BUILD = models.build_with(models.scanned)
ARGS = models.shapes(4, 32, 8, 64)
BUDGET = "2MiB"


@pytest.fixture
def refusing(monkeypatch):
    """A set to which numbers of compiles are added, from 1, that fail as XLA's do."""
    refused, count = set(), [0]
    real = Local.compile_fully

    def compile_(self, stage, traced):
        count[0] += 1
        if count[0] not in refused:
            return real(self, stage, traced)
        failed = concurrent.futures.Future()
        failed.set_exception(StepError("XLA could not compile the step: INTERNAL"))
        return failed

    monkeypatch.setattr(Local, "compile_fully", compile_)
    monkeypatch.setattr(History, "recall", lambda self: [])  # each search is the first
    return refused


@pytest.mark.parametrize("which", [slow({2}), {2, 4}])
def test_another_plan_is_found(refusing, which):
    """The first compile is of everything kept, the second the first guess."""
    refusing |= which
    plan = jaxmem.plan(BUILD, *ARGS, budget=BUDGET)
    assert plan.compiled_bytes <= 2 * 2**20
    assert not plan.keeps_everything
    assert plan.compiles > max(which), "all of them were tried, and more"


def test_the_step_itself_has_to_compile(refusing):
    refusing.add(1)
    with pytest.raises(StepError, match="INTERNAL"):
        jaxmem.plan(BUILD, *ARGS, budget=BUDGET)

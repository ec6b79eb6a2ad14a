"""Errors of a step's own code under `jaxmem.jit`."""

import jax
import pytest

import jaxmem
from jaxmem.errors import StepError
from tests.shared.foreign import plain as models

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("own_cache")]
LOSS, PARAMS, (BATCH,) = models.gemma_in_a_scan()


class OwnError(Exception):
    """An exception of a user's library."""


@pytest.mark.parametrize("own", [OwnError("rank"), TypeError("rank"), StopIteration()])
def test_an_error_of_the_steps_own_code_is_raised_as_under_jit(own):
    """The error's traceback does not show an error of jaxmem before it."""

    def wrong(params, batch):
        jax.grad(LOSS)(params, batch)
        raise own

    with pytest.raises(type(own)) as raised:
        jaxmem.jit(wrong)(PARAMS, BATCH)
    assert raised.value is own
    assert own.__cause__ is None
    assert own.__context__ is None


def test_the_errors_before_an_error_of_the_step_are_shown():
    def wrong(params, batch):
        jax.grad(LOSS)(params, batch)
        try:
            return {}[batch.shape]
        except KeyError:
            raise OwnError("unknown shape")  # noqa: B904 implicit on purpose

    with pytest.raises(OwnError) as raised:
        jaxmem.jit(wrong)(PARAMS, BATCH)
    assert isinstance(raised.value.__context__, KeyError)
    assert not raised.value.__suppress_context__
    assert raised.value.__context__.__context__ is None


def test_a_failure_of_the_rewritten_step_alone_is_an_error_of_jaxmem():
    as_written = jax.grad

    def wrong_under_a_plan(params, batch):
        if jax.grad is not as_written:
            raise TypeError("under a plan")
        return jax.grad(LOSS)(params, batch)

    with pytest.raises(StepError, match="TypeError: under a plan") as raised:
        jaxmem.jit(wrong_under_a_plan)(PARAMS, BATCH)
    assert isinstance(raised.value.__cause__, TypeError)

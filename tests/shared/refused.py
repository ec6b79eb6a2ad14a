"""Tests of calls that must raise an error."""

import functools
import inspect
from collections.abc import Callable

import pytest


def refused(error: type[Exception] | tuple[type[Exception], ...], *cases: tuple) -> Callable:
    """Returns a decorator that runs a test for each case. A case has the values of the test's first
    parameters, and a pattern. The test must raise `error` with a message that matches the pattern.
    """

    def decorate(test):
        given = [*inspect.signature(test).parameters.values()]
        message = inspect.Parameter("message", inspect.Parameter.KEYWORD_ONLY)

        @functools.wraps(test)
        def run(*, message, **arguments):
            with pytest.raises(error, match=message):
                test(**arguments)

        run.__signature__ = inspect.Signature([*given, message])
        names = [parameter.name for parameter in given[: len(cases[0]) - 1]]
        return pytest.mark.parametrize((*names, "message"), cases)(run)

    return decorate

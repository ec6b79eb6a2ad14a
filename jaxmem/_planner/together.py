"""plan() in several processes: the first one plans, and all compile its plan's step."""

import functools
import json
from collections.abc import Callable
from typing import Any, ParamSpec

from jaxmem import errors
from jaxmem._core.progress import LOG
from jaxmem._planner.verify import verify
from jaxmem._result.plan import file
from jaxmem._result.plan.plan import Plan
from jaxmem._target.devices.target import Target
from jaxmem._target.processes.channel import joined
from jaxmem._trace.arguments import sized
from jaxmem.errors import JaxmemError

P = ParamSpec("P")
# Seconds that a process waits while the first one plans: a search of large steps takes hours. The
# coordinator reports a process that has died long before.
LONGEST = 24 * 3600.0


def by_the_first(plan: Callable[P, Plan]) -> Callable[P, Plan]:
    """`plan`, called in the first of the processes that `jax.distributed` has joined. All of them
    get its plan, or its error, and compile the plan's step by the same lines, so that they have the
    same program. A process that is alone plans.
    """

    @functools.wraps(plan)
    def by_all(*args: P.args, **kwargs: P.kwargs) -> Plan:
        processes = joined()
        if processes.alone:
            return plan(*args, **kwargs)
        processes.agreed(lambda: None)  # all have come: else the first would plan for nobody
        processes.wait(LONGEST)
        failed: JaxmemError | None = None
        made: Plan | None = None

        def decide() -> dict[str, Any]:
            nonlocal failed
            try:
                return {"plan": json.dumps(plan(*args, **kwargs).to_json())}
            except JaxmemError as error:
                failed = error
                least = getattr(error, "least_bytes", None)
                return {"error": type(error).__name__, "text": str(error), "least_bytes": least}

        def compile() -> None:
            nonlocal made
            made = _compiled(message["plan"], args)

        if not processes.first:
            LOG.info("waiting for the plan of process 0")
        message = processes.first_does(decide)
        if "error" in message:
            raise failed or _error_of(message)
        # A process in which the step does not compile ends the call in all.
        processes.agreed(compile)
        assert made is not None
        return made

    return by_all


def _compiled(text: str, args: tuple) -> Plan:
    """The plan of process 0, with its step compiled here; a plan for another device has none.

    text: the plan as JSON.
    args: those of `plan`.
    """
    plan = file.read(Plan, json.loads(text), "the plan of process 0")
    if not Target.parse(plan.target).local:
        return plan
    build, *own = args
    return verify(plan, build, *(own if plan.batch is None else sized(tuple(own), plan.batch)))


def _error_of(message: dict[str, Any]) -> JaxmemError:
    """The error that the first process sent, of the same type."""
    kind = getattr(errors, message["error"], JaxmemError)
    if issubclass(kind, errors.BudgetError):
        return kind(message["text"], least_bytes=message["least_bytes"])
    return kind(message["text"])

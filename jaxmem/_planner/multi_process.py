"""plan() in several processes: the first process plans, and all processes compile its step."""

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
LEAST = "least_bytes", "least_budget"  # fields of a `BudgetError`
# Seconds that a process waits while the first process plans: the search for a large step takes
# hours. The coordinator of `jax.distributed` reports a dead process much earlier.
LONGEST = 24 * 3600.0


def by_the_first(plan: Callable[P, Plan]) -> Callable[P, Plan]:
    """Wraps `plan` for processes that `jax.distributed` has joined. Only the first process calls
    `plan`. Every process gets the plan of the first process, or its error. Every process compiles
    the plan's step by the same code, so that all processes have the same program. If there is only
    one process, it calls `plan`.
    """

    @functools.wraps(plan)
    def by_all(*args: P.args, **kwargs: P.kwargs) -> Plan:
        processes = joined()
        if processes.alone:
            return plan(*args, **kwargs)
        # Wait until every process has called `plan`, before the first process plans for all.
        processes.agreed(lambda: None)
        processes.wait(LONGEST)
        failed: JaxmemError | None = None

        def decide() -> dict[str, Any]:
            nonlocal failed
            try:
                return {"plan": json.dumps(plan(*args, **kwargs).to_json())}
            except JaxmemError as error:
                failed = error
                least = {name: getattr(error, name, None) for name in LEAST}
                return {"error": type(error).__name__, "text": str(error), **least}

        if not processes.first:
            LOG.info("waiting for the plan of process 0")
        message = processes.first_does(decide)
        if "error" in message:
            raise failed or _error_of(message)
        # If the step does not compile in one process, the call raises in every process.
        return processes.each(lambda: _compiled(message["plan"], args))

    return by_all


def _compiled(text: str, args: tuple) -> Plan:
    """The plan of process 0, with its step compiled in this process. A plan for a device that is
    not at hand has no compiled step.

    text: the plan as JSON.
    args: the positional arguments of `plan`.
    """
    plan = file.read(Plan, json.loads(text), "the plan of process 0")
    if not Target.parse(plan.target).local:
        return plan
    step_args = args[1:] if plan.batch is None else sized(args[1:], plan.batch)
    return verify(plan, args[0], *step_args)


def _error_of(message: dict[str, Any]) -> JaxmemError:
    """The error of the first process, with its type, from the process's message."""
    kind = getattr(errors, message["error"], JaxmemError)
    if issubclass(kind, errors.BudgetError):
        return kind(message["text"], **{name: message[name] for name in LEAST})
    return kind(message["text"])

"""Replans during training, in a thread that traces with the settings of the training's thread."""

import concurrent.futures
import contextlib
import dataclasses
import inspect
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax

from jaxmem._cost.profile.times import beside_training
from jaxmem._planner.explain.explain import explain
from jaxmem._planner.plan import plan as make_plan
from jaxmem._planner.search.measure import remember_run
from jaxmem._planner.verify import verify
from jaxmem._result.plan.plan import Plan
from jaxmem._trace.settings import settings_of_thread
from jaxmem._trace.step import with_microbatches
from jaxmem._train.checkpoints.stored import shape
from jaxmem.errors import JaxmemError, StepError

Made = concurrent.futures.Future[tuple[Plan, Any]]
# Arguments of `jaxmem.plan` that a rectifier sets itself or takes from the first plan. `measure`
# would run steps on the device, and `fresh` would time pieces on it again.
NOT_ASKED = ("build", "args", "budget", "target", "outliers", "microbatches", "batch", "sizes")
NOT_ASKED += ("measure", "fresh")


class Replanner:
    """Makes plans of one step with another capacity for outliers, or for less memory.

    build, args: the arguments of `jaxmem.plan`.
    asked: the other options of `jaxmem.plan`, such as `codecs` and `actions`.
    wrap: a function from a plan's step to the step that the training runs.
    """

    def __init__(self, plan: Plan, build: Callable, args: tuple, asked: dict[str, Any], wrap):
        takes = [n for n in inspect.signature(make_plan).parameters if n not in NOT_ASKED]
        for name in asked:
            if name not in takes:
                raise StepError(
                    f"Rectifier: got {name}=; expected what `jaxmem.plan` chooses from:"
                    f" {', '.join(takes)}"
                )
        if not args:
            raise StepError(
                "Rectifier: got no arguments of the step; expected those that `jaxmem.plan` was"
                " given, or their shapes"
            )
        self.build = with_microbatches(build, plan.microbatches)
        # Shapes alone: the arrays may be freed before planning ends.
        self.args, self._asked, self._wrap = jax.tree.map(shape, args), asked, wrap
        self._first = plan
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._ends = threading.Event()

    def begin(self, budget: int, outliers) -> Made:
        """Starts to make a plan and its executable for this device, in a thread, while training
        continues.
        """
        return self._in_thread(self.now, budget, outliers)

    def _in_thread(self, function: Callable, *given) -> concurrent.futures.Future:
        """Runs a function in the rectifier's thread, in the settings of JAX that training uses."""
        # Read for each plan: a rectifier may be made before the training sets its mesh.
        as_in_training = _as_here()

        def work():
            with as_in_training(), beside_training(self._ends.is_set):
                return function(*given)

        if self._thread is None:
            self._ends.clear()
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "jaxmem-rectifier")
        return self._thread.submit(work)

    def now(self, budget: int, outliers) -> tuple[Plan, Any]:
        """Makes a plan and its executable for this device. Raises the errors of `jaxmem.plan`."""
        first, given = self._first, {"budget": budget, "outliers": outliers}
        made = make_plan(self.build, *self.args, target=first.target, **given, **self._asked)
        made = dataclasses.replace(made, microbatches=first.microbatches, batch=first.batch)
        return made, self.executable(made)

    def at_once(self, budget: int, outliers) -> tuple[Plan, Any]:
        """`now`, while the training waits and its arrays occupy the device."""
        with beside_training(lambda: False):
            return self.now(budget, outliers)

    def remember(self, plan: Plan, other: Plan, seconds: float, noise: float) -> None:
        """Stores by how much the steps of a plan for this device took longer than another plan's
        steps, so that later plans of the step are priced by the difference.
        """
        if plan.target != "local":
            return
        run = (plan.actions, other.actions, seconds, noise)
        done = self._in_thread(remember_run, self.build, self.args, *run)
        done.add_done_callback(_log)

    def executable(self, plan: Plan) -> Any:
        """The step under a plan, compiled for this device. The plan may be for another target."""
        if plan.target == "local" and plan.is_compiled:
            return self._wrap(plan.step)
        # A plan for this device binds its budget here; one for another does not.
        budget = plan.budget_bytes if plan.target == "local" else sys.maxsize
        here = dataclasses.replace(plan, target="local", budget_bytes=budget, microbatches=None)
        return self._wrap(verify(here, self.build, *self.args).step)

    def explained(self, plan: Plan) -> str:
        """The buffers that hold the memory of the step under a plan, as text; empty if they are
        unknown.
        """
        try:
            return str(explain(self.build, *self.args, plan=plan, target=plan.target))
        except JaxmemError:
            return ""

    def close(self) -> None:
        """Cancels planning. A compile that is running is finished first."""
        self._ends.set()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = None


def _log(done: concurrent.futures.Future) -> None:
    """Logs the error of work in the thread."""
    if not done.cancelled() and (error := done.exception()) is not None:
        logging.getLogger("jaxmem").warning("times of steps were not written down: %s", error)


def _as_here() -> Callable[[], contextlib.AbstractContextManager]:
    """The settings of this thread and its mesh, for another thread."""
    mesh = jax.sharding.get_mesh()
    return settings_of_thread(*([] if mesh.empty else [(jax.set_mesh, mesh)]))

"""Plans again beside the training, in a thread that sees JAX as the one that trains does."""

import concurrent.futures
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxmem._explain.explain import explain
from jaxmem._jax.step import with_microbatches
from jaxmem._plan.plan import Plan
from jaxmem._planner.measured import remember_run
from jaxmem._planner.plan import plan as make_plan
from jaxmem._planner.verify import verify
from jaxmem._profile.times import beside_training
from jaxmem.errors import JaxmemError


class Replanner:
    """Makes plans of one step with other room for outliers, or for less memory.

    build, args: those of `jaxmem.plan`.
    asked: what else it was given, such as `codecs` and `actions`.
    """

    def __init__(self, plan: Plan, build: Callable, args: tuple, asked: dict[str, Any]):
        self.build = with_microbatches(build, plan.microbatches)
        self.args, self._asked = jax.tree.map(_shape, args), asked
        self._first = plan
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jaxmem-rectifier")
        self._same = _as_here()

    def begin(self, budget: int, outliers) -> "concurrent.futures.Future[tuple[Plan, Any]]":
        """A plan and its executable on this device, made while training goes on."""

        def work():
            with self._same(), beside_training():
                return self.now(budget, outliers)

        return self._thread.submit(work)

    def now(self, budget: int, outliers) -> tuple[Plan, Any]:
        """The same, waited for. Raises what `jaxmem.plan` raises."""
        first = self._first
        made = make_plan(
            self.build, *self.args, budget=budget, target=first.target, outliers=outliers,
            **self._asked,
        )  # fmt: skip
        made = dataclasses.replace(made, microbatches=first.microbatches, batch=first.batch)
        return made, self.executable(made)

    def remember(self, plan: Plan, other: Plan, seconds: float, noise: float) -> None:
        """Writes down by how much the steps of a plan for this device took longer than those of
        another, so that later plans of the step are priced by it.
        """
        if plan.target == "local":
            run = (plan.actions, other.actions, seconds, noise)
            self._thread.submit(remember_run, self.build, self.args, *run)

    def executable(self, plan: Plan) -> Any:
        """The step under a plan, compiled for this device: a plan may be for another."""
        if plan.target == "local":
            return plan.step if plan._step is not None else self._verified(plan)
        here = dataclasses.replace(plan, target="local", budget_bytes=sys.maxsize)
        return self._verified(here)

    def explained(self, plan: Plan) -> str:
        """What holds the memory of the step under a plan, in words; empty where that is unknown."""
        try:
            return str(explain(self.build, *self.args, plan=plan, target=plan.target))
        except JaxmemError:
            return ""

    def _verified(self, plan: Plan):
        alone = dataclasses.replace(plan, microbatches=None)  # `build` has them
        return verify(alone, self.build, *self.args).step

    def close(self) -> None:
        """Waits for a compile that cannot be stopped."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _shape(leaf):
    """An array's shape in its place: the state that training begins with is let go meanwhile."""
    if not isinstance(leaf, jax.Array):
        return leaf
    place = leaf.sharding if leaf.committed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place, weak_type=leaf.weak_type)


def _as_here() -> Callable[[], contextlib.AbstractContextManager]:
    """What makes another thread trace as this one does now: JAX's contexts are a thread's own."""
    config: Any = jax.config  # its options are attributes by name, which types do not tell
    x64, precision = config.jax_enable_x64, config.jax_default_matmul_precision
    mesh = jax.sharding.get_mesh()

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(x64))
            stack.enter_context(jax.default_matmul_precision(precision))
            if not mesh.empty:
                stack.enter_context(jax.set_mesh(mesh))
            yield

    return entered

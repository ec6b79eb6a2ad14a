"""The arguments that a step is explained for: those of the caller, or with its states where a plan
places them.
"""

import dataclasses

from jaxmem._model.states.places import Places
from jaxmem._planner.explain.names import Arguments
from jaxmem._planner.joint.steps import PlacedSteps
from jaxmem._result.plan.plan import Plan
from jaxmem._target.buffers.held import Peak
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.compiled.compiled import Compiled
from jaxmem.errors import PlanFileError


@dataclasses.dataclass(frozen=True)
class Given:
    """Arguments, and what their states take in either memory.

    args: arrays or shapes.
    steps, places: what placed the states, and where; None where no plan places them.
    """

    args: tuple
    steps: PlacedSteps | None = None
    places: Places | None = None

    def sizes(self, compiled: Compiled) -> tuple[int, int]:
        """Bytes of a compiled step on the device, and in host memory."""
        if self.steps is None or self.places is None:
            return compiled.total_bytes, compiled.host_bytes
        return self.steps.in_memories(compiled, self.places)

    def apart(self, full: Peak, arguments: Arguments) -> Peak:
        """What a compiled step holds, arguments that were placed in host memory marked so. A CPU's
        program does not tell the two memories apart.
        """
        if self.places is None:
            return full
        held = [
            dataclasses.replace(h, host=True)
            if h.kind == "argument" and arguments.name_of(h.op) in arguments.hosted
            else h
            for h in full.held
        ]
        return dataclasses.replace(full, held=tuple(held))


def given(plan: Plan | None, build, args: tuple, backend: Backend) -> tuple[Given, Given]:
    """The arguments of a step under a plan, and of the step without one, whose states are on the
    device then.

    Raises PlanFileError for a plan of another number of layers, StepError where it places states
    and `build` returns no released step.
    """
    if plan is None or plan.places is None:
        return Given(args), Given(args)
    steps, places = PlacedSteps(build, args, backend, plan.divided), plan.places
    if steps.layers != places.layers:
        raise PlanFileError(
            f"explain: the plan is for another model: its `places.layers` is {places.layers}, and"
            f" the model has {steps.layers}; plan this model anew"
        )
    at = lambda where: Given(steps.args_at(where), steps, where)
    return at(places), at(Places(places.layers, places.layers))

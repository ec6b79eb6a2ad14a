"""A released step under given actions and with its states at given places: traced, estimated
and compiled.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxmem._core.assignment import Assignment
from jaxmem._model.states.places import HOST, Places
from jaxmem._model.states.stacks import masters_of
from jaxmem._model.states.within import opened
from jaxmem._optim.released.form import check_pair
from jaxmem._optim.released.step import ReleasedStep
from jaxmem._planner.placement.layer import States
from jaxmem._planner.placement.mesh import Divided, mesh_of
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._result.plan.plan import Plan, other_model
from jaxmem._target.compile.protocol import Backend
from jaxmem._trace.arguments import shard_bytes
from jaxmem._trace.step import trace
from jaxmem.errors import StepError


class PlacedSteps:
    """Traces, estimates and compiles the steps of one `build`.

    build: takes a plan and returns a released step.
    args: the step's arguments, the state first: arrays or shapes, in any form.
    backend: where it is compiled.
    how: what is divided over devices, as `data_parallel` takes it; None for a step of one device.

    Raises StepError for a step whose states cannot be placed, or divided.
    """

    def __init__(self, build, args: tuple, backend: Backend, how: str | None = None):
        self.build, self.backend = build, backend
        self.compiles, self.seconds = 0, 0.0
        self._made, self._over = build(None), None
        self._step, self._pair = _released(self._made)
        if not args:
            raise StepError("plan: got no arguments; expected the step's, its state first")
        try:
            pair = self._pair(args[0])
        except Exception as error:
            raise StepError(
                f"plan: `get` of the step's `within` raised {type(error).__name__} for the state:"
                f" {error}; expected the pair of parameters and optimizer's state"
            ) from error
        check_pair(self._step.model, pair)
        # A step that is compiled to run here knows its devices, of which shapes need not tell.
        here = SingleDeviceSharding(jax.local_devices()[0]) if backend.target.local else None
        self._state = jax.tree.map(lambda a: _shape(a, here), args[0])
        self._others = args[1:]
        if how is None:
            return
        if self._step is not self._made:
            raise StepError(
                "plan: `decide` has 'sharding', and `build` returned a step within which another is"
                " called; expected what jaxmem.released_step returns, which is divided as a whole"
            )
        over = self._over = Divided(*mesh_of(self._step, args, backend.target), how)
        self._state = over.state(self._step, self._state)
        self._others = over.others(self._others)
        self.build = lambda plan: over.step(build(plan))

    @property
    def label(self) -> str:
        """That of the layers' block."""
        return self._step.model.label

    @property
    def layers(self) -> int:
        return self._step.model.count(self._pair(self._state)[0])

    @property
    def resident(self) -> Places:
        """Where states lie that are all on the device."""
        return Places(self.layers, self.layers)

    @property
    def split(self) -> Callable:
        """Moves a state, as the released step does; to where it is divided, before."""
        if (over := self._over) is None:
            return self._made.split
        step = self._step

        def move(state, persist: int, **where):
            wanted, *_ = self.args_at(Places(self.layers, persist, **where))
            if _lies_as(state, wanted):
                return state
            return step.split(over.moved(step, state), persist, **where)

        return move

    def create(self, outer, layer: Callable, count: int, persist: int, **where):
        """Makes a state, as the released step does; divided, if the step is. Raises StepError where
        the step's state holds more than the pair.
        """
        if self._made is not self._step:
            raise StepError(
                "Plan.create: the step's state holds more than the released step's pair; make that"
                " by the released step's `create`, with **plan.places.split, and put it in"
            )
        if (over := self._over) is not None:
            where |= {"mesh": over.mesh, "divided": over.how}
        return self._step.create(outer, layer, count, persist, **where)

    @property
    def devices(self) -> int:
        """Over how many devices states are divided."""
        return 1 if self._over is None else self._over.devices

    def args_at(self, places: Places) -> tuple:
        """The step's arguments with the state at `places`, as shapes."""
        return self._made.split(self._state, **places.split), *self._others

    def states(self) -> States:
        """What the step's states take."""
        model, layers = self._step.model, self.layers
        params, state = self._pair(self._state)
        stacks, *_ = self._step.optimizer.opened(model, params, state)
        of = lambda places: _bytes(self.args_at(places))
        resident, _ = of(self.resident)
        _, outside = of(dataclasses.replace(self.resident, outer_moments=HOST))
        streamed, _ = of(Places(layers, 0))
        copied, _ = of(Places(layers, 0, copies=layers))
        size = lambda tree: sum(shard_bytes(a) for a in jax.tree.leaves(tree)) // layers
        parameters, moments = map(size, (masters_of(params[model.layers]), stacks))
        # What crosses between devices does in the dtype of compute.
        crosses = lambda a: a.size * jnp.dtype(model.dtype or a.dtype).itemsize
        wire = lambda tree: sum(map(crosses, jax.tree.leaves(tree)))
        return States(
            layers=layers,
            parameters=parameters,
            moments=moments,
            copy=(copied - streamed) // layers,
            outside=outside,
            fixed=resident - outside - layers * (parameters + moments),
            wire=wire(masters_of(params[model.layers])) // layers,
            outside_wire=wire(model.outer(params)),
            outside_stored=sum(
                a.size * a.dtype.itemsize for a in jax.tree.leaves(model.outer(params))
            ),
        )

    def trace(self, assignment: Assignment | None, places: Places) -> tuple[Any, jax.stages.Traced]:
        return trace(self.build, assignment, self.args_at(places))

    def estimate(self, assignment: Assignment | None, places: Places) -> int:
        """Bytes that the step is expected to take on the device, its arguments among them."""
        _, traced = self.trace(assignment, places)
        return self.backend.step_bytes(traced, _bytes(self.args_at(places))[0])

    def compile(self, assignment: Assignment, places: Places) -> CompiledStep:
        """Raises StepError where XLA does not compile it."""
        start = time.perf_counter()
        stage, traced = self.trace(assignment, places)
        compiled = self.backend.compile(stage, traced).result()
        self.compiles += 1
        self.seconds += time.perf_counter() - start
        actions = {label: dict(choices) for label, choices in assignment.actions.items()}
        return CompiledStep(actions, compiled, places)


def placed_steps(plan: Plan, build, args: tuple, backend: Backend, what: str) -> PlacedSteps:
    """The steps of a plan that places states. Raises PlanFileError where the model has another
    number of layers.

    what: the public function that errors are from.
    """
    assert plan.places is not None
    steps = PlacedSteps(build, args, backend, plan.divided)
    if steps.layers != plan.places.layers:
        raise other_model(
            what, "places.layers", plan.places.layers, f"and the model has {steps.layers}"
        )
    return steps


def _released(made) -> tuple[ReleasedStep, Callable]:
    """The released step that `build` returned, or that is within it, and what takes its pair out of
    a state. Raises StepError for anything else.
    """
    step, pair = opened(made)
    if not isinstance(step, ReleasedStep):
        raise StepError(
            f"plan: states are placed, and `build` returned {type(step).__name__}; expected what"
            " jaxmem.released_step returns, whose states can be split, or its `within` where a step"
            " of your own calls it; or plan without 'states' in `decide`"
        )
    if step.clip.how == "norm":
        raise StepError(
            "plan: states are placed, and the step clips by the global norm, for which the layers'"
            " backward runs twice: expected clip=('component', c) or ('value', c), or a plan"
            " without 'states' in `decide`"
        )
    return step, pair


def _shape(a, here) -> jax.ShapeDtypeStruct:
    """The shape of an array, or of a shape, where it lies; `here` where it does not say."""
    a = a if hasattr(a, "dtype") else jnp.asarray(a)
    sharding = getattr(a, "sharding", None)
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here if sharding is None else sharding)


def _bytes(args: tuple) -> tuple[int, int]:
    """Bytes of shapes on one device, and in its host memory."""
    device = host = 0
    for a in jax.tree.leaves(args):
        kind = getattr(getattr(a, "sharding", None), "memory_kind", None)
        if kind == HOST:
            host += shard_bytes(a)
        else:
            device += shard_bytes(a)
    return device, host


def _lies_as(state, wanted) -> bool:
    """Whether a state's arrays are where shapes say, and of these shapes."""
    if jax.tree.structure(state) != jax.tree.structure(wanted):
        return False
    same = lambda a, w: (
        isinstance(a, jax.Array)
        and a.shape == w.shape
        and a.sharding.memory_kind == w.sharding.memory_kind
        and a.sharding.is_equivalent_to(w.sharding, a.ndim)
    )
    return all(jax.tree.leaves(jax.tree.map(same, state, wanted)))

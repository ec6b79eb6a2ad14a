"""Traces, estimates and compiles a released step under given actions, with its states at given
places.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxmem._core.assignment import FLOAT, INT8, Assignment, in_8_bits
from jaxmem._core.lists import separated
from jaxmem._model.states.places import HOST, Places
from jaxmem._optim.adama.eight_bits import is_quantized
from jaxmem._optim.released.bound import BoundStep
from jaxmem._optim.released.form import check_is_pair
from jaxmem._optim.released.loss import bound
from jaxmem._optim.released.segments import SegmentedStep
from jaxmem._optim.released.step import ReleasedStep, released_of
from jaxmem._planner.placement.layer import COPIED, LAYERS, PLACES, RESIDENT, STREAMED, States
from jaxmem._planner.placement.mesh import Divided, mesh_of
from jaxmem._planner.search.compile import CompiledStep, StepCompiler
from jaxmem._result.plan.plan import Plan, other_model
from jaxmem._target.compile.protocol import Backend
from jaxmem._trace.arguments import shard_bytes
from jaxmem.errors import StepError

LATEST = 4  # places whose traces are kept


class PlacedSteps:
    """Traces, estimates and compiles the steps of one `build`.

    build: takes a plan and returns a released step.
    args: the step's arguments, the state first: arrays or shapes, in any form.
    backend: estimates and compiles the step.
    how: the states that are divided over devices, as `data_parallel` takes it; None for a step of
      one device.
    label: the label of the layers' block.
    moments: how the step stores the optimizer's moments. With "int8", `build` receives plans whose
      `moments` are "int8", and a state with float moments is converted.

    Raises StepError for a step whose states cannot be placed or divided. Raises OptimizerError for
    float moments that cannot be stored in 8 bits.
    """

    def __init__(
        self, build, args: tuple, backend: Backend, how: str | None = None, moments: str = FLOAT
    ):
        exact, self.moments = _bound(build, args), moments
        if moments == INT8:
            exact_build = build
            build = lambda plan: exact_build(in_8_bits(plan))
        self.build, self.backend = build, backend
        # Traces and compiles the step with its states at given places, the latest ones.
        at = lambda places: StepCompiler(self.build, self.args_at(places), backend)
        self.at = functools.lru_cache(maxsize=LATEST)(at)
        self._estimated: dict[tuple[str, Places], int] = {}
        self.compiles, self.seconds = 0, 0.0
        self._made, self._over = _bound(build, args) if moments == INT8 else exact, None
        self._step, self._pair = _released(self._made)
        self.label, self._exact = self._step.label, _released(exact)[0]
        if not args:
            raise StepError("plan: got no arguments; expected the step's, its state first")
        try:
            pair = self._pair(args[0])
        except Exception as error:
            raise StepError(
                f"plan: `get` of the step's `within` raised {type(error).__name__} for the state:"
                f" {error}; expected the pair of parameters and optimizer's state"
            ) from error
        check_is_pair(pair)
        self._step.count(pair[0])
        # A step for the device at hand is compiled for concrete devices. Shapes need not have a
        # sharding; they get the sharding of the first device.
        here = SingleDeviceSharding(jax.local_devices()[0]) if backend.target.local else None
        self._state = self._with_moments(jax.tree.map(lambda a: _shape(a, here), args[0]))
        self._state = jax.tree.map(lambda a: _shape(a, here), self._state)
        self._others = args[1:]
        if how is None:
            return
        made = self._made
        if not isinstance(made, ReleasedStep | BoundStep):
            raise StepError(
                "plan: `decide` has 'sharding', and `build` returned a step within which another is"
                " called; expected what jaxmem.released_step returns, which is divided as a whole"
            )
        over = self._over = Divided(*mesh_of(self._step, args, backend.target), how)
        self._state = over.state(made, self._state)
        self._others = over.others(self._others)
        self.build = lambda plan: over.step(build(plan))

    @property
    def layers(self) -> int:
        return self._step.count(self._pair(self._state)[0])

    @property
    def possible(self) -> tuple[str, ...]:
        """The places in which the states of a layer may be stored."""
        return PLACES if isinstance(self._step, ReleasedStep) else (RESIDENT, STREAMED)

    @property
    def resident(self) -> Places:
        """The places of states that are all in device memory."""
        return Places(self.layers, self.layers)

    def split(self, state, persist: int, **where):
        """Moves a state to given places, as the released step's `split`. If the step is divided
        over devices, the state is divided first.
        """
        state, step = self._with_moments(state), self._made
        if self._over is not None:
            shapes, *_ = self.args_at(Places(self.layers, persist, **where))
            if _is_placed_as(state, shapes):
                return state
            state = self._over.moved(step, state)
        return step.split(state, persist, **where)

    def _with_moments(self, state):
        """A state of the step, from a state with float moments or of the step."""
        if self.moments == FLOAT or is_quantized(self._pair(state)[1]):
            return state
        pair = self._exact.quantized_state(self._pair(state))
        return self._made.put(state, pair) if self._made is not self._step else pair

    def check_quantized(self) -> None:
        """Raises OptimizerError if the step's moments cannot be stored in 8 bits."""
        self._step.quantized_state(self._pair(self._state))

    def create(self, params, layer: Any, count: int, persist: int, **where):
        """Makes a state, as the released step's `create`. The state is divided if the step is.
        `layer` is None for the step of a whole loss. Raises StepError if the step's state holds
        more than the released step's pair, and for a `layer` of a loss.
        """
        if (over := self._over) is not None:
            where |= {"mesh": over.mesh, "divided": over.how}
        if isinstance(self._made, BoundStep) and layer is None:
            return self._made.create(params, persist, **where)
        if isinstance(self._made, BoundStep):
            raise StepError(
                "Plan.create: got `layer`, and the step is of a whole loss; expected all parameters"
                " alone, a tree of NumPy arrays"
            )
        if self._made is not self._step:
            raise StepError(
                "Plan.create: the step's state holds more than the released step's pair; make that"
                " by the released step's `create`, with **plan.places.split, and put it in"
            )
        assert isinstance(self._step, ReleasedStep)
        return self._step.create(params, layer, count, persist, **where)

    @property
    def devices(self) -> int:
        """The number of devices over which states are divided."""
        return 1 if self._over is None else self._over.devices

    def args_at(self, places: Places) -> tuple:
        """The step's arguments with the state at `places`, as shapes."""
        return self._made.split(self._state, **places.split), *self._others

    def states(self) -> States:
        """The bytes of the step's states."""
        layers = self.layers
        masters, stacks, outer = self._step.arrays(self._pair(self._state))
        bytes_at = lambda places: _bytes(self.args_at(places))
        resident, _ = bytes_at(self.resident)
        _, outside = bytes_at(dataclasses.replace(self.resident, outer_moments=HOST))
        streamed, _ = bytes_at(Places(layers, 0))
        copies = layers if COPIED in self.possible else 0
        copied, _ = bytes_at(Places(layers, 0, copies=copies))
        size = lambda tree: sum(shard_bytes(a) for a in jax.tree.leaves(tree)) // layers
        parameters, moments = map(size, (masters, stacks))
        frozen = (resident - streamed) // layers - parameters - moments
        is_gathered = self._over is not None and self._over.how == LAYERS
        # Collectives between devices move arrays in the dtype of compute.
        wire_bytes = lambda a: a.size * jnp.dtype(self._step.dtype or a.dtype).itemsize
        wire = lambda tree: sum(map(wire_bytes, jax.tree.leaves(tree)))
        return States(
            layers=layers,
            parameters=parameters,
            moments=moments,
            copy=(copied - streamed) // layers,
            outside=outside,
            fixed=resident - outside - layers * (parameters + moments + frozen),
            wire=wire(masters) // layers,
            outside_wire=wire(outer),
            outside_stored=sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(outer)),
            frozen=frozen,
            frozen_wire=self.devices * frozen if is_gathered else 0,
        )

    def estimate(self, assignment: Assignment, places: Places) -> int:
        """Estimated device bytes of the step, its arguments included. The estimate is made once."""
        key = repr(assignment), places
        if key not in self._estimated:
            step = self.at(places)
            arguments, _ = _bytes(step.args)
            self._estimated[key] = self.backend.step_bytes(*step.derived(assignment), arguments)
        return self._estimated[key]

    def compile_fully(self, assignment: Assignment, places: Places) -> CompiledStep:
        """Compiles the step fully. Raises StepError if XLA does not compile it."""
        start = time.perf_counter()
        compiled = self.backend.compile_fully(*self.at(places).stages(assignment)).result()
        self.compiles += 1
        self.seconds += time.perf_counter() - start
        actions = {label: dict(choices) for label, choices in assignment.actions.items()}
        return CompiledStep(actions, compiled)


def placed_steps(plan: Plan, build, args: tuple, backend: Backend, what: str) -> PlacedSteps:
    """The steps of a plan that places states. Raises PlanFileError if the model has another number
    of layers than the plan.

    what: the public function that error messages name.
    """
    assert plan.places is not None
    steps = PlacedSteps(build, args, backend, plan.divided, plan.moments)
    if steps.layers != plan.places.layers:
        raise other_model(
            what, "places.layers", plan.places.layers, f"and the model has {steps.layers}"
        )
    return steps


def _bound(build, args: tuple):
    """Returns the step that `build` makes, for the step's arguments."""
    made = bound(build(None), args)
    # Under a plan, a layer of a Python loop may be less than a checkpoint that the user wrote.
    return bound(build(Assignment.nothing()), args) if isinstance(made, SegmentedStep) else made


def _released(made) -> tuple[ReleasedStep | SegmentedStep, Callable]:
    """The released step that `build` returned, or that is within the returned step, and the
    function that takes the released step's pair out of a state. Raises StepError if `build`
    returned no released step.
    """
    step, pair = released_of(made)
    if not isinstance(step, ReleasedStep | SegmentedStep):
        raise StepError(
            f"plan: states are placed, and `build` returned {type(step).__name__}; expected what"
            " jaxmem.released_step returns, whose states can be split, or its `within` where a step"
            " of your own calls it; or plan without 'states' in `decide`"
        )
    return step, pair


def _shape(a, here) -> jax.ShapeDtypeStruct:
    """The shape of an array or of a shape, with its sharding; `here` if it has no sharding."""
    a = a if hasattr(a, "dtype") else jnp.asarray(a)
    sharding = getattr(a, "sharding", None)
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here if sharding is None else sharding)


def _bytes(args: tuple) -> tuple[int, int]:
    """Bytes of shapes on one device, and in the host memory of this device."""
    arrays = jax.tree.leaves(args)
    kinds = (getattr(getattr(a, "sharding", None), "memory_kind", None) for a in arrays)
    host, device = separated(arrays, [kind == HOST for kind in kinds])
    return sum(map(shard_bytes, device)), sum(map(shard_bytes, host))


def _is_placed_as(state, shapes) -> bool:
    """Whether a state's arrays have the given shapes, memories and shardings."""
    if jax.tree.structure(state) != jax.tree.structure(shapes):
        return False
    same = lambda a, w: (
        isinstance(a, jax.Array)
        and a.shape == w.shape
        and a.sharding.memory_kind == w.sharding.memory_kind
        and a.sharding.is_equivalent_to(w.sharding, a.ndim)
    )
    return all(jax.tree.leaves(jax.tree.map(same, state, shapes)))

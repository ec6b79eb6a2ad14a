"""The released step: minibatches of a model, with its states in their places.

The step runs on one device, or on each of several devices.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._core.assignment import INT8, moments_of
from jaxmem._model.states import layout
from jaxmem._model.states.layout import masters_of
from jaxmem._model.states.places import DIVIDED
from jaxmem._model.states.shards import placed, shards
from jaxmem._optim.released import placement
from jaxmem._optim.released.bound import BoundStep
from jaxmem._optim.released.direct import Direct
from jaxmem._optim.released.fold import Clip
from jaxmem._optim.released.form import (
    axis_in,
    check_axis,
    check_clip,
    check_divided,
    check_has_mesh,
    check_new,
    check_pair,
    check_split,
    check_stacks,
    check_untraced,
    like_in_8_bits,
)
from jaxmem._optim.released.model import Model, Optimizer
from jaxmem.errors import OptimizerError


@dataclasses.dataclass(frozen=True, eq=False)
class Within:
    """A training step that calls a released step, and whose state holds more arrays.

    `Within` is called like the wrapped function. `split` and `joined` place the states of the
    released step.

    released: the released step that `step` calls.
    step: the wrapped function.
    get: `get(state)` returns the pair that the released step receives.
    put: `put(state, pair)` returns the state with `pair` in place of its own pair.
    """

    released: Any
    step: Callable
    get: Callable[[Any], tuple[Any, Any]]
    put: Callable[[Any, tuple[Any, Any]], Any]

    def __call__(self, state, *args, **named):
        return self.step(state, *args, **named)

    def split(self, state, persist: int, **where):
        """Returns the state with its pair placed by `ReleasedStep.split`.

        state: the state of the wrapped function.
        persist: number of layers, the first ones, whose states are stored in device memory.
        where: the other arguments of `ReleasedStep.split`.

        Raises the errors of `ReleasedStep.split`.
        """
        return self.put(state, self.released.split(self.get(state), persist, **where))

    def joined(self, state):
        """Returns the state with its pair joined by `ReleasedStep.joined`.

        Raises the errors of `ReleasedStep.joined`.
        """
        return self.put(state, self.released.joined(self.get(state)))


@dataclasses.dataclass(frozen=True, eq=False)
class ReleasedStep:
    """A training step that releases gradients: `step(state, batch, key=None) -> (state, metrics)`.

    `jaxmem.released_step` makes a released step.

    `state` is the pair of the parameters and the optimizer's state. The optimizer's state is an
    AdamAState or a RowState for AdamA, and the tree that `tx.init` makes for an optax
    transformation. Donate the state. `batch` is a tree of arrays. AdamA's `accumulation_steps`
    divides the length of their leading axis. `key` is a random key. Microbatch i receives
    `fold_in(key, i)`, and layer j of microbatch i receives `fold_in` of this key and j.

    `metrics` is a dict. `loss` is the mean over microbatches. `grad_norm` is the root mean square
    of the microbatches' gradient norms. `skipped`, int32, counts the gradients of layers, and of
    arrays outside the layers, that were not used, because the gradient or its squared norm was not
    finite. `skipped_layers`, int32 (L,), counts the skipped gradients of each layer.

    optimizer: how gradients are used, and the form of the optimizer's state.
    model: the model as three functions.
    clip: how gradients are clipped.
    """

    optimizer: Optimizer
    model: Model
    clip: Clip

    @property
    def label(self) -> str:
        """The label of the layers' block in a plan."""
        return self.model.label

    @property
    def axis_name(self) -> str | None:
        """The mesh axis of data parallelism; None on one device."""
        return self.optimizer.axis_name

    @property
    def accumulates(self) -> bool:
        """Whether the step accumulates microbatches in AdamA's moments."""
        return not isinstance(self.optimizer, Direct)

    @property
    def dtype(self) -> Any:
        """The dtype of compute; None for the parameters' own dtypes."""
        return self.model.dtype

    def count(self, params) -> int:
        """The number of layers. Raises OptimizerError for parameters of another model."""
        return self.model.count(params)

    def arrays(self, state) -> tuple[Any, Any, Any]:
        """Sorts the arrays of a state: the layers' trained parameters, the layers' arrays in the
        optimizer's state, and the trained parameters outside the layers.
        """
        stacks, *_ = self.optimizer.opened(self.model, *state)
        return masters_of(state[0][self.model.layers]), stacks, self.model.outer(state[0])

    def init(self, params) -> tuple[Any, Any]:
        """Makes the first state: the pair of the parameters and the optimizer's state.

        params: the parameters, in device memory: a dict in which the layers' parameters are
          stacked.

        Raises OptimizerError for parameters that `released_step` does not support, or that are
        stored in host memory. Raises StackError if the layers' parameters are not stacked.
        """
        self.model.check(params)
        check_new(self.model, params)
        return params, self.optimizer.init(self.model, params)

    def create(
        self,
        outer,
        layer: Callable,
        count: int,
        persist: int = 0,
        *,
        copies: int = 0,
        buffers: int = 0,
        outer_moments: str = "device",
        mesh=None,
        divided: str = "nothing",
    ) -> tuple[Any, Any]:
        """Makes the first state one layer at a time, with each array where `split` would store it.

        The model need not fit into a device's memory. In addition to the arrays of the state that a
        device stores, the device needs memory for its part of one layer, or for one whole layer, if
        `layer` cannot be computed in parts.

        outer: the parameters outside the layers, a dict.
        layer: a function. `layer(i)` returns the parameters of layer i; i is a traced int32.
        count: number of layers.
        persist, copies, buffers, outer_moments: as for `split`.
        mesh, divided: as for `data_parallel`. Without a mesh, each device that stores `outer`
          stores the whole state.

        Raises OptimizerError and TargetError as `init`, `split` and `data_parallel` do.
        """
        check_untraced("create", "outer", outer)
        check_has_mesh(mesh, divided)
        divide = None
        if mesh is not None:
            axis = axis_in("create", self.optimizer.axis_name, mesh)
            size = mesh.shape[axis]
            divide = lambda params: self.specs(params, size, divided)
        places = placement.places_of(count, persist, copies, buffers, outer_moments)
        arguments = outer, layer, places, mesh, divide
        return placement.created(self.model, self.optimizer, *arguments)

    def split(
        self,
        state,
        persist: int,
        *,
        copies: int = 0,
        buffers: int = 0,
        outer_moments: str = "device",
    ) -> tuple[Any, Any]:
        """Moves the states of all layers but the first `persist` to pinned host memory.

        The states of a layer are its parameters and their part of the optimizer's state. A step
        copies the moved states to the device one layer at a time. The first `persist` layers
        correspond to ProTrain's persistent chunks.

        state: the pair of parameters and optimizer's state, in any form: resident, split, or as
          shapes. For shapes, the result says in which memory each array is stored.
        persist: number of layers, the first ones, whose states are stored in device memory.
        copies: number of layers after these whose parameters have a copy in device memory, in the
          step's `dtype`. Their states are stored in host memory. The forward fetches nothing for
          these layers.
        buffers: number of layers, the last of the remaining ones, whose parameters stay on the
          device from the forward to the backward. The backward does not fetch these parameters
          again (ProTrain's n_buffer).
        outer_moments: the memory of the optimizer's arrays outside the layers, "device" or
          "pinned_host". The optimizer's scalars, and the parameters outside the layers, are stored
          in device memory in any case.

        The original of an array that moves is deleted, one array of the state at a time. `split`
        changes no value. On a CPU, in float32, and without clipping, steps from a split state are
        equal to steps from a resident state, to the last bit.

        Raises OptimizerError for a number of layers outside the valid range, for another memory,
        for moments of other parameters, and inside `jax.jit`. Raises TargetError if the host has
        too little memory.
        """
        state = self._of_arrays("split", state)
        count = self.model.count(state[0])
        places = placement.places_of(count, persist, copies, buffers, outer_moments)
        return placement.split(self.model, self.optimizer, state, places)

    def joined(self, state) -> tuple[Any, Any]:
        """Joins the stacks of a split state: each array of the layers becomes one stack.

        The joined state does not depend on the number of layers that were in each memory, so it is
        a form for checkpoints. A joined stack is stored in host memory if a part of the stack was
        stored there. The original of an array that moves is deleted.

        state: the pair of parameters and optimizer's state, in any form.

        Raises OptimizerError if the moments belong to other parameters, and inside `jax.jit`.
        """
        state = self._of_arrays("joined", state)
        return placement.joined(self.model, self.optimizer, state)

    def quantized(self) -> "ReleasedStep":
        """Returns the step whose optimizer stores its moments in 8 bits, 2 bytes a parameter for
        Adam: `jaxmem.adama(..., moments="int8")`, or `jaxmem.quantized(tx)` for another `tx`.

        Raises OptimizerError for AdamA with `mu_dtype`.
        """
        return dataclasses.replace(self, optimizer=self.optimizer.quantized())

    def quantized_state(self, state) -> tuple[Any, Any]:
        """Returns a state of this step as a state of `quantized()`: the joined parameters, and the
        moments in 8 bits, rounded stochastically.

        Moments are coded one layer at a time, in the memories where they are stored. The originals
        of coded moments are deleted, and the originals of arrays that `joined` moves.

        state: the pair of parameters and optimizer's state, in any form: resident, split, or as
          shapes.

        Raises OptimizerError if the optimizer's state has no array that 8 bits can store, such as
        the state of `optax.sgd` without momentum, or if it is stored in 8 bits already; and as
        `joined` does.
        """
        params, old = state = self.joined(state)
        init = functools.partial(self.quantized().optimizer.init, self.model)
        like = like_in_8_bits(init, params, old)
        kept = layout.sharing(state)
        made = params, self.optimizer.coded(self.model, params, like, old, kept)
        layout.delete_unless_in(made, kept)
        return made

    def within(self, step: Callable, get: Callable, put: Callable) -> Within:
        """Wraps a function that calls this step, so that a plan can place the states of the step.

        Use `within` for `jaxmem.plan(..., decide=("actions", "states"))` if the state of your
        function holds more than the pair of parameters and optimizer's state.

        step: `step(state, *args)`, your function, with a state of any form.
        get: `get(state)` returns the pair of parameters and optimizer's state that this step
          receives.
        put: `put(state, pair)` returns the state with `pair` in place of its own pair.
        """
        return Within(self, step, get, put)

    def with_plan(self, plan) -> "ReleasedStep":
        """Returns the step under another plan."""
        step = self.quantized() if moments_of(plan) == INT8 else self
        return dataclasses.replace(step, model=dataclasses.replace(self.model, plan=plan))

    def __call__(self, state, batch, key=None):
        check_pair(self.model, state)
        check_axis(self.optimizer.axis_name)
        if self.optimizer.axis_name is None:  # in `shard_map`, a device may have parts of arrays
            self._check(state)
        self._check_split(state)
        return self.part(state[0], state, batch, key)

    def _of_arrays(self, name: str, state):
        """Converts the leaves of the state to arrays, and checks the state. `name` is the method's
        name.
        """
        check_untraced(name, "state", state)
        state = jax.tree.map(_array, state)
        self._check(state)
        return state

    def _check(self, state) -> None:
        """Raises OptimizerError unless the state is of this model and optimizer."""
        check_pair(self.model, state)
        self.optimizer.check(self.model, *state)

    def check(self, state) -> None:
        """Raises OptimizerError unless the state is of this model and optimizer, and all its stacks
        are split in the same way.
        """
        self._check(state)
        self._check_split(state)

    def _check_split(self, state) -> None:
        """Raises OptimizerError unless all stacks of a state are split in the same way."""
        stacks, *_ = self.optimizer.opened(self.model, *state)
        check_split({"params": state[0][self.model.layers], **stacks})

    def part(self, like, state, batch, key=None, by_layer: bool = False):
        """Runs one minibatch, on one device or inside `jax.shard_map` on each of several.

        `like` has the shapes of the whole parameters. A device may have parts of the arrays of
        `state`.
        """
        check_clip(self.clip, like)
        return self.optimizer.minibatch(self.model, self.clip, like, state, batch, key, by_layer)

    def data_parallel(self, mesh, divided: str = "nothing"):
        """Returns the step over the devices of a mesh axis. The devices divide the batch.

        mesh: a `jax.sharding.Mesh` with the optimizer's `axis_name`, an axis of M devices.
        divided: the arrays that the devices divide in addition to the batch: "nothing", "moments",
          "states" or "layers".

        With "nothing", each device has its own moments. One all-reduce per minibatch reduces the
        moments, for any number of microbatches. The result equals the result of one device with M
        times as many microbatches (AdamA §3.3).

        With "moments" (ZeRO-1), each device stores a part of the moments, along an axis whose
        length M divides. Each layer's mean gradient is reduce-scattered once per microbatch.
        Parameters are all-gathered once per minibatch. The result equals the result of one device
        with microbatches that are M times as large.

        With "states", each device stores a part of the moments and of the parameters. Parameters
        are all-gathered at the start of a minibatch, in the step's `dtype` if it has one.

        With "layers" (ZeRO-3), each device stores a part of the moments and of the parameters. Each
        layer's parameters are all-gathered when the layer runs, in the forward and in the backward
        of each microbatch. Divided states in host memory are gathered one layer at a time too.

        `specs` returns the layout of the state. The numbers of microbatches continue from device to
        device, so that each microbatch has a key of its own.

        Raises OptimizerError if the optimizer has no `axis_name`, or if the mesh does not have this
        axis.
        """
        axis = axis_in("data_parallel", self.optimizer.axis_name, mesh)
        everything, over = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(axis)

        def step(state, batch, key=None):
            self.check(state)
            layout = self.specs(state[0], mesh.shape[axis], divided)
            like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state[0])
            by_layer = divided == "layers"
            keys = () if key is None else (key,)
            call = lambda state, batch, key=None: self.part(like, state, batch, key, by_layer)
            specs, out = (layout, over, *(everything for _ in keys)), (layout, everything)
            # Unchecked: otherwise the loops of a model would have to declare which carries vary.
            mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
            return mapped(*placed((state, batch, *keys), specs, mesh))

        return step

    def specs(self, params, devices: int, divided: str = "nothing"):
        """Returns the PartitionSpecs of a state for `data_parallel` with the same `divided`.

        The result is a pair of trees, like the state that `init` makes.

        params: the parameters, or their shapes.
        devices: number of devices along `axis_name`.
        divided: "nothing", "moments", "states" or "layers", as for `data_parallel`.

        Raises OptimizerError for another `divided`, for an optimizer without `axis_name`, and if
        this number of devices cannot divide the largest of the layers' arrays. Raises StackError if
        the layers' parameters are not stacked.
        """
        axis, everything = self.optimizer.axis_name, jax.sharding.PartitionSpec()
        if divided not in DIVIDED:
            raise OptimizerError(
                f"specs: `divided` is {divided!r}; expected one of {', '.join(map(repr, DIVIDED))}"
            )
        divided = "states" if divided == "layers" else divided
        if axis is None:
            raise OptimizerError(
                "specs: the optimizer has no `axis_name`; expected the mesh axis to divide over"
            )
        check_stacks(self.model, params)
        if divided != "nothing":
            check_divided(self.model, params, devices)
        # A loop reads a layer by its index, so stacked arrays are not divided along their first
        # axis.
        parts = {
            k: shards(v, devices, axis, first=int(k == self.model.layers))
            for k, v in params.items()
        }
        everywhere = jax.tree.map(lambda _: everything, params)
        made = self.optimizer.specs(self.model, params, parts, divided)
        return parts if divided == "states" else everywhere, made


def released_of(step) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the released step in the result of a `build`, and the function that gets the released
    step's pair from a state.
    """
    if isinstance(step, Within):
        return step.released, step.get
    if isinstance(step, BoundStep):
        return step.released, step.opened
    return step, lambda state: state


def _array(a):
    """Converts a value to an array on a device. A shape is returned unchanged."""
    return a if isinstance(a, jax.Array | jax.ShapeDtypeStruct) else jnp.asarray(a)

"""The released step: an optimizer's minibatches of a model, on one device or on each of several,
and its states in their places.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._model.states.places import DIVIDED
from jaxmem._model.states.shards import placed, shards
from jaxmem._model.states.within import Within
from jaxmem._optim.released import placement
from jaxmem._optim.released.creation import created
from jaxmem._optim.released.fold import Clip
from jaxmem._optim.released.form import (
    check_clip,
    check_divided,
    check_new,
    check_pair,
    check_split,
    check_stacks,
    check_untraced,
)
from jaxmem._optim.released.model import Model, Optimizer
from jaxmem.errors import OptimizerError


@dataclasses.dataclass(frozen=True, eq=False)
class ReleasedStep:
    """`step(state, batch, key=None) -> (state, metrics)`, as `jaxmem.released_step` makes it.

    `state` is a pair of the parameters and the optimizer's state: AdamAState, or for an optax
    transformation the tree that its `init` makes; donate it. `batch` is a tree of arrays with a
    leading axis that AdamA's `accumulation_steps` divides. `key` is a random key: microbatch i is
    given `fold_in(key, i)`, and its layer j `fold_in` of that and j.

    `metrics` is a dict: `loss`, the mean over microbatches; `grad_norm`, the root mean square of
    the microbatches' gradient norms; `skipped`, how many folds were left out since a gradient, or
    its squared norm, was not finite, int32; `skipped_layers`, how many of these were of each layer,
    int32 (L,).

    optimizer: what becomes of gradients and states.
    model: the model as three functions.
    clip: how gradients are clipped.
    """

    optimizer: Optimizer
    model: Model
    clip: Clip

    def init(self, params) -> tuple[Any, Any]:
        """Makes the first state, the pair of the parameters and the optimizer's state.

        Raises OptimizerError for parameters that `released_step` cannot take, or that lie in host
        memory; StackError where those of the layers are no stacks.
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
        """Makes the first state of a model that need not fit into the device's memory: that of
        `split(init(params), ...)`, a layer at a time, each in its place. Of what is divided over
        devices each holds its part, and beside all parts one whole layer.

        outer: the parameters outside the layers, a dict.
        layer: `layer(i)` makes the parameters of layer i, an int32 that is traced.
        count: how many layers there are.
        persist, copies, buffers, outer_moments: those of `split`.
        mesh, divided: those of `data_parallel`. Without a mesh the state lies whole on each of the
          devices that `outer` lies on.

        Raises OptimizerError and TargetError as `init`, `split` and `data_parallel` do.
        """
        check_untraced("create", "outer", outer)
        divide = None
        if mesh is not None:
            size = mesh.shape[self._axis("create", mesh)]
            divide = lambda params: self.specs(params, size, divided)
        elif divided != "nothing":
            raise OptimizerError(
                f"create: `divided` is {divided!r}, and `mesh` is None; expected the mesh over"
                " whose devices data_parallel divides the state"
            )
        where = placement.placement(count, persist, copies, buffers)
        arguments = outer, layer, where, outer_moments, mesh, divide
        return created(self.model, self.optimizer, *arguments)

    def split(
        self,
        state,
        persist: int,
        *,
        copies: int = 0,
        buffers: int = 0,
        outer_moments: str = "device",
    ) -> tuple[Any, Any]:
        """Moves the states of all layers but the first `persist` to pinned host memory, from which
        a step copies them a layer at a time (ProTrain's persistent chunks).

        persist: of how many layers, the first ones, parameters and moments lie in device memory.
        copies: of how many layers after these a copy of the parameters, in the step's `dtype`, lies
          in device memory beside the states in host memory: no forward fetches them.
        buffers: how many of the others, the last layers, keep the parameters that the forward
          fetched until the backward, which then fetches none (ProTrain's n_buffer).
        outer_moments: the memory of the optimizer's arrays outside the layers, "device" or
          "pinned_host"; its numbers, and the parameters there, lie in device memory.

        Arrays that move are deleted where they were, a parameter's and a moment's at a time.
        `state` may be in any form, and of shapes: the result then tells where they lie. No
        value changes: steps from the result are those of a resident state, to the last bit in
        float32 where nothing is clipped.

        Raises OptimizerError for numbers of layers that there are not, another memory, moments of
        other parameters, or inside of `jax.jit`; TargetError if the host has too little memory.
        """
        state = self._of_arrays("split", state)
        where = placement.placement(self.model.count(state[0]), persist, copies, buffers)
        return placement.split(self.model, self.optimizer, state, where, outer_moments)

    def joined(self, state) -> tuple[Any, Any]:
        """The state with each of the layers' arrays as one stack again, which no placement changes:
        what checkpoints hold. The stack lies in host memory if a part of it did. Arrays that move
        are deleted where they were.

        Raises OptimizerError if the moments are of other parameters, or inside of `jax.jit`.
        """
        state = self._of_arrays("joined", state)
        return placement.joined(self.model, self.optimizer, state)

    def within(self, step: Callable, get: Callable, put: Callable) -> Within:
        """Makes of a function that calls this step, and whose state holds more than a pair, one
        whose states can be placed: for `jaxmem.plan(..., decide=("actions", "states"))`.

        step: `step(state, *args)`, the state in any form that you like.
        get: `get(state)`, the pair of parameters and optimizer's state that this step is given.
        put: `put(state, pair)`, the state with this pair in place of its own.
        """
        return Within(self, step, get, put)

    def __call__(self, state, batch, key=None):
        check_pair(self.model, state)
        if self.optimizer.axis_name is None:  # else it runs where a device may have parts of arrays
            self._check(state)
        self._check_split(state)
        return self._step(state[0], state, batch, key)

    def _of_arrays(self, name: str, state):
        """The state with an array in the place of what can be made one; `name` is the method's."""
        check_untraced(name, "state", state)
        state = jax.tree.map(_array, state)
        self._check(state)
        return state

    def _check(self, state) -> None:
        check_pair(self.model, state)
        self.optimizer.check(self.model, *state)

    def _check_split(self, state) -> None:
        stacks, *_ = self.optimizer.opened(self.model, *state)
        check_split({"params": state[0][self.model.layers], **stacks})

    def _step(self, like, state, batch, key=None, by_layer: bool = False):
        """Runs one minibatch, on one device or inside `jax.shard_map` on each of several.

        `like` has the whole parameters' shapes; of the arrays of `state` a device may have a part.
        """
        check_clip(self.clip, like)
        taken = like, state, batch, key, by_layer
        made = self.optimizer.minibatch(self.model, self.clip, *taken)
        return made.state, made.metrics(self.optimizer.axis_name)

    def data_parallel(self, mesh, divided: str = "nothing"):
        """The step over the devices of `mesh`'s axis `axis_name`, with the batch divided over them.

        mesh: a `jax.sharding.Mesh` that has the optimizer's axis.
        divided: what is divided beside the batch. "nothing": moments are each device's own until
          one all-reduce a minibatch, whatever the number of microbatches; the result is that of one
          device with as many times more microbatches (AdamA §3.3). "moments" (ZeRO-1): each device
          has a part of the moments, along an axis of theirs that the devices divide; each layer's
          mean gradient is reduce-scattered each microbatch, and parameters are all-gathered once;
          the result is that of one device with microbatches as many times larger. "states":
          parameters too; they are all-gathered as a minibatch starts, in `dtype` where the step was
          made with one. "layers" (ZeRO-3): the same states, of which each layer's parameters are
          gathered as its turn comes, in the forward and in the backward of each microbatch, as they
          are of states in host memory.

        `specs` gives the state's layout. Microbatches are counted on from device to device, so that
        each has a key of its own.

        Raises OptimizerError if the optimizer was made without `axis_name`, or for another axis.
        """
        axis = self._axis("data_parallel", mesh)
        everything, over = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(axis)

        def step(state, batch, key=None):
            self._check(state)
            self._check_split(state)
            layout = self.specs(state[0], mesh.shape[axis], divided)
            like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state[0])
            by_layer = divided == "layers"
            keys = () if key is None else (key,)
            call = lambda state, batch, key=None: self._step(like, state, batch, key, by_layer)
            specs, out = (layout, over, *(everything for _ in keys)), (layout, everything)
            # Unchecked, since a model's own loops would have to tell which of their carries vary.
            mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
            return mapped(*placed((state, batch, *keys), specs, mesh))

        return step

    def _axis(self, method: str, mesh) -> str:
        """The axis of `mesh` that is the optimizer's. Raises OptimizerError if it has none."""
        axis = self.optimizer.axis_name
        if axis is None or axis not in mesh.shape:
            raise OptimizerError(
                f"{method}: the optimizer's `axis_name` is {axis!r}, and `mesh` has"
                f" {', '.join(map(repr, mesh.shape))};"
                " expected one of them: jaxmem.adama(..., axis_name=...), or of another optimizer's"
                " step, released_step(..., axis_name=...)"
            )
        return axis

    def specs(self, params, devices: int, divided: str = "nothing"):
        """The PartitionSpecs of a state, a pair as `init` makes it, for `data_parallel` with the
        same `divided`.

        params: the parameters, or their shapes.
        devices: how many devices `axis_name` has.
        divided: "nothing", "moments", "states" or "layers".

        Raises OptimizerError for another `divided` than `data_parallel` takes, without `axis_name`,
        or where so many devices cannot divide the largest of the layers' arrays; StackError where
        the layers' parameters are no stacks.
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
        # A layer is read by its index, so stacked arrays are divided along a later axis than the
        # first.
        parts = {
            k: shards(v, devices, axis, first=int(k == self.model.layers))
            for k, v in params.items()
        }
        everywhere = jax.tree.map(lambda _: everything, params)
        made = self.optimizer.specs(self.model, params, parts, divided)
        return parts if divided == "states" else everywhere, made


def _array(a):
    """An array on a device, or a shape as it is."""
    return a if isinstance(a, jax.Array | jax.ShapeDtypeStruct) else jnp.asarray(a)

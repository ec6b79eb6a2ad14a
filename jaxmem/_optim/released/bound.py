"""The released step of a loss for arguments of given shapes."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from jaxmem._model.states import layout
from jaxmem._model.states.shards import placed
from jaxmem._optim.adama.transform import AdamA
from jaxmem._optim.released.fold import Clip
from jaxmem._optim.released.form import axis_in


class BoundStep(abc.ABC):
    """A training step of a divided loss: `step(state, batch, key=None) -> (state, metrics)`.

    `state` and `metrics` are as `LossStep` documents them. A plan places the states of the layers:
    `released` is the step whose states are placed, `opened(state)` the pair that it receives, and
    `put(state, pair)` the state with another pair.

    tx: the optimizer.
    clip: how gradients are clipped.
    axis_name: the mesh axis of data parallelism; None on one device.
    given: `given(batch, key)` returns the batch with the microbatches' keys.
    leaves: `leaves(microbatch)` returns the arrays that the loss reads.
    named: `named(metrics)` arranges the auxiliary values as the loss does.
    """

    released: Any

    def __init__(
        self,
        tx: optax.GradientTransformation,
        clip: Clip,
        axis_name: str | None,
        given: Callable[..., tuple],
        leaves: Callable[[Any], list],
        named: Callable[[dict[str, Any]], dict[str, Any]],
    ):
        self.tx, self.clip, self.axis_name = tx, clip, axis_name
        self.given, self.leaves, self.named = given, leaves, named

    @abc.abstractmethod
    def opened(self, state) -> tuple[Any, Any]:
        """The pair that the released step receives."""

    @abc.abstractmethod
    def put(self, state, pair) -> tuple[Any, Any]:
        """The state with `pair` in place of its own pair."""

    @abc.abstractmethod
    def split(
        self, state, persist: int, *, copies=0, buffers=0, outer_moments=layout.DEVICE
    ) -> tuple[Any, Any]:
        """Moves the states of all layers but the first `persist` to pinned host memory, as
        `ReleasedStep.split` does.
        """

    @abc.abstractmethod
    def create(
        self, params, persist: int = 0, *, mesh=None, divided: str = "nothing", **where
    ) -> tuple[Any, Any]:
        """Makes the first state one layer at a time, as `ReleasedStep.create` does.

        params: the parameters, NumPy arrays.
        persist, mesh, divided, where: the arguments of `ReleasedStep.create`.
        """

    @abc.abstractmethod
    def joined(self, state) -> tuple[Any, Any]:
        """Joins the stacks of a split state, as `ReleasedStep.joined` does."""

    @abc.abstractmethod
    def specs(self, params, devices: int, divided: str = "nothing"):
        """Returns the PartitionSpecs of a state, as `ReleasedStep.specs` does."""

    @abc.abstractmethod
    def run(self, state, given: tuple) -> tuple[Any, dict[str, Any]]:
        """Runs a minibatch. `metrics["aux"]` is a list of the arrays that the loss returns after
        the loss itself.
        """

    @abc.abstractmethod
    def run_of_device(self, state, divided: str) -> Callable:
        """Returns `run` for each device inside `jax.shard_map`, which has a part of the batch and
        of the state. The arguments are the whole state, and `divided` of `data_parallel`.
        """

    def __call__(self, state, batch, key=None):
        new, metrics = self.run(state, self.given(batch, key))
        return new, self.named(metrics)

    def data_parallel(self, mesh, divided: str = "nothing") -> Callable:
        """Returns the step over the devices of a mesh axis, for a batch of all devices. This step
        is bound for the batch of one device. The arguments are as for `LossStep.data_parallel`.
        """
        axis = axis_in("data_parallel", self.axis_name, mesh)
        everything, over = PartitionSpec(), PartitionSpec(axis)

        def step(state, batch, key=None):
            run = self.run_of_device(state, divided)
            layout = self.specs(state[0], mesh.shape[axis], divided)

            def call(state, given):
                new, metrics = run(state, given)
                aux = metrics.pop("aux")
                if not isinstance(self.tx, AdamA):
                    aux = [a[None] for a in aux]  # the only microbatch of this device
                return new, metrics, aux

            specs, out = (layout, over), (layout, everything, over)
            # Unchecked: otherwise the loops of a model would have to declare which carries vary.
            mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
            new, metrics, aux = mapped(*placed((state, self.given(batch, key)), specs, mesh))
            return new, self.named(metrics | {"aux": aux})

        return step

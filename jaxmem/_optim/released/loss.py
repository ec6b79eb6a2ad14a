"""The released step of a loss as it is: the loop over layers is found in the loss's trace.

Parameters and the optimizer's state keep the user's own tree. The step converts them to the form of
`ReleasedStep`, a dict of two lists of leaves, and back. The conversion renames arrays, and computes
nothing. The alternative is a state in the form of `ReleasedStep`: checkpoints, masks and learning
rates by path would no longer fit the user's tree.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem._core.assignment import INT8, moments_of
from jaxmem._model.auto.divide import DividedLoss, divided_loss
from jaxmem._model.auto.segments import PythonLoops, SegmentedLoss
from jaxmem._model.states.layout import one_layer
from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem._optim.adama.eight_bits import quantized
from jaxmem._optim.adama.transform import AdamA
from jaxmem._optim.released.accumulated import microbatches
from jaxmem._optim.released.bound import BoundStep
from jaxmem._optim.released.fold import Clip
from jaxmem._optim.released.form import axis_in, check_is_pair
from jaxmem._optim.released.loss_form import LossForm
from jaxmem._optim.released.scanned import ScannedStep
from jaxmem._optim.released.segments import SegmentedStep
from jaxmem._trace.signature import refusal
from jaxmem.errors import OptimizerError


@dataclasses.dataclass(frozen=True, eq=False)
class LossStep:
    """A training step of a loss that releases gradients: `step(state, batch, key=None)`.

    `jaxmem.released_step(tx, loss)` makes it. `state` is the pair of the parameters and the
    optimizer's state, each in the user's own tree, and `metrics` is as `ReleasedStep` documents it.
    With `has_aux`, `metrics["aux"]` is the tree that the loss returns after the loss itself; for
    AdamA, its arrays have a leading axis of microbatches. If the step receives a key, the loss is
    called as `loss(params, microbatch, key)`. Microbatch i receives entry i of
    `jax.random.split(key, accumulation_steps)`.

    tx: the optimizer.
    loss: the loss, `loss(params, microbatch)`, a mean.
    plan, label: as for `released_step`.
    clip: how gradients are clipped.
    has_aux: whether the loss returns a pair of the loss and a tree of arrays.
    trainable: which parameters are trained, as for `released_step`; None trains all of them.
    axis_name: the mesh axis of data parallelism, as for `released_step`.
    """

    tx: optax.GradientTransformation
    loss: Callable
    plan: Any
    label: str
    clip: Clip
    has_aux: bool = False
    trainable: Any = None
    axis_name: str | None = None

    def init(self, params, batch, key=None) -> tuple[Any, Any]:
        """Makes the first state: the pair of `params` and the optimizer's state.

        params: the parameters: any tree of arrays. Trained parameters are floating-point arrays in
          device memory.
        batch: a batch, or its shapes. With it, the loop over layers is found.
        key: the random key, if the loss takes one.

        Raises OptimizerError for other parameters, and NoLayersError if the loss has no loop over
        layers.
        """
        bound = self.of(params, batch, key)
        state = params, None
        return bound.put(state, bound.released.init(bound.opened(state)[0]))

    def create(self, params, batch, key=None, *, persist: int = 0, **where) -> tuple[Any, Any]:
        """Makes the first state one layer at a time, with each array where `split` would store it,
        so that the parameters and moments need not fit into a device's memory.

        params: the parameters, NumPy arrays. A layer is copied to the device when its states are
          made.
        batch, key: as for `init`.
        persist: number of layers, the first ones, whose states are stored in device memory.
        where: `copies`, `buffers`, `outer_moments`, `mesh` and `divided`, as for
          `ReleasedStep.create`.

        Raises the errors of `init` and of `ReleasedStep.create`, and OptimizerError for copies and
        buffers of layers in a Python loop.
        """
        return self.of(params, batch, key).create(params, persist, **where)

    def with_plan(self, plan) -> "LossStep":
        """Returns the step under another plan."""
        return dataclasses.replace(self, plan=plan, tx=stored_under(plan, self.tx))

    def __call__(self, state, batch, key=None):
        check_is_pair(state)
        return self.of(state[0], batch, key)(state, batch, key)

    def data_parallel(self, mesh, divided: str = "nothing") -> Callable:
        """Returns the step over the devices of a mesh axis. The devices divide the batch, and the
        loss is traced for the microbatch of one device.

        mesh, divided: as for `ReleasedStep.data_parallel`. Layers of a Python loop take "nothing"
          or "layers".

        With "layers", the devices also divide the frozen parameters of layers. Other frozen
        parameters of a scanned loss are stored whole on each device. With a key, microbatch i of
        device d receives entry d·n + i of `jax.random.split(key, devices·n)`, where n is the number
        of microbatches of a device. With `has_aux`, the arrays of `metrics["aux"]` have a leading
        axis of the microbatches of all devices: for an optax transformation, a device has one.

        Raises OptimizerError as `ReleasedStep.data_parallel` does. The step raises the errors of
        `init`.
        """
        axis = axis_in("data_parallel", self.axis_name, mesh)

        def step(state, batch, key=None):
            check_is_pair(state)
            bound = self.of(state[0], batch, key, mesh.shape[axis])
            return bound.data_parallel(mesh, divided)(state, batch, key)

        return step

    def of(self, params, batch, key=None, devices: int = 1) -> BoundStep:
        """Returns the step for arguments of these shapes. The methods `split` and `joined` of the
        result place the states of the layers, as the same methods of `ReleasedStep` do.

        params, batch, key: arrays or shapes. `params` may be of a split state.
        devices: the number of devices that divide the batch.

        Raises the errors of `init`.
        """
        _check_key(key)
        form = LossForm(params, isinstance(self.tx, AdamA), self.trainable)
        n = self.tx.rule.accumulation_steps if isinstance(self.tx, AdamA) else 1
        count, one = n * devices, batch
        if isinstance(self.tx, AdamA) or devices > 1:
            # One microbatch, without the leading axis of microbatches.
            one = one_layer(jax.eval_shape(lambda batch: microbatches(batch, n, devices), batch))
        rest = one, *(() if key is None else (key,))
        divided, of_aux = self._divided(form, rest)
        leaves = lambda given: jax.tree.leaves((given[0], *(k[0] for k in given[1:])))

        def given(batch, key=None) -> tuple:
            return batch, *(() if key is None else (jax.random.split(key, count),))

        def named(metrics):
            """Arranges the auxiliary values as the loss does, if it has any."""
            aux = {"aux": jax.tree.unflatten(of_aux, metrics["aux"])} if self.has_aux else {}
            return {k: v for k, v in metrics.items() if k != "aux"} | aux

        step = self.tx, self.clip, self.axis_name, given, leaves, named
        if isinstance(divided, SegmentedLoss):
            trained = form.trained(form.shapes)
            return SegmentedStep(*step, loss=divided, shapes=form.shapes, trained=trained)
        form.layers = divided.layers
        return ScannedStep(*step, loss=divided, form=form, plan=self.plan, label=self.label)

    def _divided(self, form: LossForm, rest: tuple) -> tuple[DividedLoss | SegmentedLoss, Any]:
        """Divides the trace of the loss for parameters of `form`, at the layers with most FLOPs:
        the iterations of a scan, or the layers of Python loops. Returns the divided loss, and the
        structure of the auxiliary values.
        """
        _check_takes(self.loss, form.shapes, *rest)
        with todays_checkpoint():
            closed, out = jax.make_jaxpr(self.loss, return_shape=True)(form.shapes, *rest)
        is_pair = isinstance(out, tuple) and len(out) == 2
        loss, aux = out if self.has_aux and is_pair else (out, None)
        alone = jax.tree.structure(loss) == jax.tree.structure(0) and (is_pair or not self.has_aux)
        first = closed.out_avals[0] if alone else None
        if first is None or first.shape or not jnp.issubdtype(first.dtype, jnp.floating):
            got = ", ".join(a.str_short() for a in closed.out_avals)
            raise OptimizerError(
                f"released_step: `loss` returned {got}; expected the microbatch's mean loss, a"
                " floating-point scalar"
                + (", and a tree of arrays" if self.has_aux else "; or has_aux=True for a pair")
            )
        planned = self.plan is not None
        loops = PythonLoops.of(closed, len(form.paths), planned, form.frozen_numbers)
        if loops is not None and loops.work > loops.scanned:
            return loops.segmented(self.plan, self.label), jax.tree.structure(aux)
        of_plan = self.label, self.plan
        divided = divided_loss(closed, form.paths, *of_plan, form.frozen_numbers)
        return divided, jax.tree.structure(aux)


def _check_key(key) -> None:
    """Raises OptimizerError for a third argument that is no random key."""
    dtype = getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if key is not None and not typed and dtype != jnp.uint32:
        got = type(key).__name__ if dtype is None else f"{dtype}{list(key.shape)}"
        raise OptimizerError(
            f"released_step: the argument after the batch is {got}; expected a random key, such as"
            " jax.random.key(0); a batch of several arrays is one argument, a tuple or a dict"
        )


def _check_takes(loss: Callable, *args) -> None:
    """Raises OptimizerError if `loss` cannot be called with these arguments: parameters, a
    microbatch, and perhaps a key.
    """
    if refused := refusal(loss, *args):
        signature, error = refused
        call = "loss(params, microbatch, key)" if len(args) > 2 else "loss(params, microbatch)"
        name = getattr(loss, "__name__", type(loss).__name__)
        raise OptimizerError(
            f"released_step: `loss` is {name}{signature}, and cannot be called as {call}: {error};"
            " expected a loss of these arguments; the key is the third argument of `init` and of"
            " the step, and a step without a key passes none"
        )


def stored_under(plan, tx) -> Any:
    """Returns the optimizer with its moments as the plan stores them."""
    if moments_of(plan) != INT8:
        return tx
    return tx.quantized() if isinstance(tx, AdamA) else quantized(tx)


def bound(made, args: tuple) -> Any:
    """Returns the result of a `build` for the step's arguments: a `LossStep` needs their shapes."""
    if not isinstance(made, LossStep) or not args:
        return made
    check_is_pair(args[0])
    return made.of(args[0][0], *args[1:])

"""The released step of a loss whose layers are the iterations of a `jax.lax.scan`: the loss as the
three functions of a `ReleasedStep`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxmem._model.auto.divide import DividedLoss
from jaxmem._model.states import layout
from jaxmem._model.states.layout import one_layer, parts_of
from jaxmem._model.states.shards import gathered, shards
from jaxmem._optim.adama.transform import AdamA
from jaxmem._optim.released import placement
from jaxmem._optim.released.accumulated import Accumulated
from jaxmem._optim.released.bound import BoundStep
from jaxmem._optim.released.direct import Direct
from jaxmem._optim.released.form import check_split, check_untraced
from jaxmem._optim.released.loss_form import LAYERS, OUTER, LossForm
from jaxmem._optim.released.model import Model
from jaxmem._optim.released.step import ReleasedStep


class ScannedStep(BoundStep):
    """A training step of a loss whose layers are the iterations of a scan. `BoundStep` documents
    the positional arguments.

    loss: the divided loss.
    form: the user's tree and the tree of a `ReleasedStep`, with the numbers of the layers' leaves.
    plan, label: as for `released_step`.
    """

    def __init__(self, *common, loss: DividedLoss, form: LossForm, plan: Any, label: str):
        super().__init__(*common)
        self.loss, self.form, self.plan, self.label = loss, form, plan, label
        self._frozen_shapes = form.frozen(form.shapes)

    @property
    def released(self) -> ReleasedStep:
        """The released step, with the shapes of the frozen parameters in place of arrays."""
        return self._with_frozen(self._frozen_shapes)

    def _with_frozen(self, frozen: dict[str, Any]) -> ReleasedStep:
        """The released step with these frozen parameters. In `jax.shard_map`, a device may have
        parts of the layers' frozen parameters.
        """
        form, divided, leaves, tx = self.form, self.loss, self.leaves, self.tx
        outer_of = lambda outer: form.merged(outer[OUTER], frozen[OUTER], of_layers=False)
        block = lambda layer, x, *shared: divided.block(
            form.merged(*layer, of_layers=True), x, *shared
        )
        model = Model(
            lambda outer, given: divided.embed(outer_of(outer), leaves(given)),
            divided.block if form.trains_all else block,
            lambda outer, x, stacked, given: divided.head(
                outer_of(outer), x, stacked, leaves(given)
            ),
            LAYERS,
            self.plan,
            self.label,
            None,
            True,
            True,
            None if form.trains_all else parts_of(frozen[LAYERS]),
            self._whole_frozen,
        )
        optimizer: Accumulated | Direct
        if isinstance(tx, AdamA):
            optimizer = Accumulated(form.masked(tx))
        else:
            optimizer = Direct(form.of_users(tx), self.axis_name)
        return ReleasedStep(optimizer, model, self.clip)

    def _whole_frozen(self, layer):
        """Gathers a layer's frozen parameters, if a device has parts of the parameters."""
        of_axis = lambda a, like: gathered(a, like, str(self.axis_name))
        return jax.tree.map(of_axis, layer, one_layer(self._frozen_shapes[LAYERS]))

    def run(self, state, given):
        return self._run(state, lambda step, pair: step(pair, given))

    def _run(self, state, call: Callable) -> tuple[Any, dict[str, Any]]:
        """Returns the new state and the metrics. `call(step, pair)` runs the released step."""
        pair, frozen = self._apart(state)
        if jax.tree.leaves(frozen[LAYERS]):
            check_split({"params": pair[0][LAYERS], "the frozen params": frozen[LAYERS]})
        else:
            none = layout.like(pair[0][LAYERS], [[] for _ in parts_of(pair[0][LAYERS])])
            frozen = frozen | {LAYERS: none}
        pair, metrics = call(self._with_frozen(frozen), pair)
        return self.form.closed(pair, frozen), metrics

    def run_of_device(self, state, divided):
        pair = self.form.opened(state)
        self.released.check(pair)
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), pair[0])
        by_layer = divided == "layers"
        return lambda state, given: self._run(
            state, lambda step, pair: step.part(like, pair, given, None, by_layer)
        )

    def specs(self, params, devices, divided="nothing"):
        made = self.released.specs(self.form.inner(self.form.trained(params)), devices, divided)
        return self.form.closed(made, self._frozen_specs(params, devices, divided))

    def _frozen_specs(self, params, devices: int, divided: str) -> dict[str, Any]:
        """The PartitionSpecs of the frozen parameters. Those outside the layers stay whole."""
        frozen = self.form.frozen(params)
        specs = jax.tree.map(lambda _: PartitionSpec(), frozen)
        if divided == "layers":
            specs[LAYERS] = shards(frozen[LAYERS], devices, str(self.axis_name), first=1)
        return specs

    def create(self, params, persist=0, *, mesh=None, divided="nothing", **where):
        trained, frozen = self.form.inner(self.form.trained(params)), self.form.frozen(params)
        count = len(jax.tree.leaves(trained[LAYERS])[0])
        fetched, over = placement.from_host(trained[LAYERS]), {"mesh": mesh, "divided": divided}
        outer = {OUTER: trained[OUTER]}
        pair = self.released.create(outer, fetched, count, persist, **over, **where)
        if jax.tree.leaves(frozen):
            devices: Any = jax.tree.leaves(pair[0])[0].sharding.mesh
            over = 1 if mesh is None else mesh.shape[self.axis_name]
            specs = self._frozen_specs(params, over, divided)
            frozen[OUTER] = placement.put(devices, frozen[OUTER], specs[OUTER], layout.DEVICE)
            if frozen[LAYERS]:
                defaults = {"copies": 0, "buffers": 0, "outer_moments": layout.DEVICE}
                places = placement.places_of(count, persist, **(defaults | where))
                given = frozen[LAYERS], specs[LAYERS], places, devices
                frozen[LAYERS] = placement.frozen_stacks(*given)
        return self.form.closed(pair, frozen)

    def opened(self, state):
        return self.form.opened(state)

    def put(self, state, pair):
        return self.form.closed(pair, self.form.frozen(state[0]))

    def split(self, state, persist, *, copies=0, buffers=0, outer_moments=layout.DEVICE):
        where = {"copies": copies, "buffers": buffers, "outer_moments": outer_moments}
        released, pair, frozen = self.released, *self._apart(state)
        if jax.tree.leaves(frozen[LAYERS]):
            check_untraced("split", "state", state)
            places = placement.places_of(released.model.count(pair[0]), persist, **where)
            stacks = released.optimizer.opened(released.model, *pair)[0]
            states = layout.masters_of(pair[0][LAYERS]), stacks, frozen[LAYERS]
            placement.check_host(states, places)
            kept = layout.sharing(state)
            frozen[LAYERS] = layout.split(frozen[LAYERS], places, kept, copied=layout.DEVICE)
        return self.form.closed(released.split(pair, persist, **where), frozen)

    def joined(self, state):
        pair, frozen = self._apart(state)
        if jax.tree.leaves(frozen[LAYERS]):
            check_untraced("joined", "state", state)
            frozen[LAYERS] = layout.joined(frozen[LAYERS], layout.sharing(state))
        return self.form.closed(self.released.joined(pair), frozen)

    def _apart(self, state) -> tuple[tuple[Any, Any], dict[str, Any]]:
        """The pair of the released step, and the frozen parameters."""
        return self.form.opened(state), self.form.frozen(state[0])

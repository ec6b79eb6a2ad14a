"""Released steps with optax's transformations: whole gradients' values, wherever states lie."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.errors import OptimizerError
from tests.shared import tiny_lm
from tests.shared.streamed import (
    LAYERS,
    apart,
    close,
    moved,
    no_bit_depends,
    parameters,
    split_at,
    tokens,
    train,
)  # fmt: skip

STEPS = 20


def schedule(count):
    return 0.01 / (1.0 + count)


def by_name(params):
    """Decays what is called so; a layer's arrays are shown without the axis of layers."""
    named = jax.tree_util.tree_map_with_path
    return named(lambda path, a: path[-1].key in ("up", "embedding") and a.ndim == 2, params)


TREE = jax.tree_util.tree_map_with_path(
    lambda path, _: path[-1].key in ("up", "embedding"), jax.eval_shape(parameters)
)
# A larger eps, so that rounding is not magnified where a gradient is nearly zero.
CASES = {
    "adamw": lambda: optax.adamw(0.01, eps=1e-3, weight_decay=0.1),
    "lion": lambda: optax.lion(1e-3, weight_decay=0.1),
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: optax.rmsprop(0.01, eps=1e-3),
}
COMPOSED = {
    "a schedule and a mask's tree": lambda: optax.adamw(
        schedule, eps=1e-3, weight_decay=3.0, mask=TREE
    ),
    "hyperparameters in the state": lambda: optax.inject_hyperparams(optax.lion)(
        schedule, weight_decay=0.1
    ),
    "a chain": lambda: optax.chain(
        optax.clip(0.01),
        optax.add_decayed_weights(0.1, mask=TREE),
        optax.trace(0.9),
        optax.scale_by_schedule(schedule),
        optax.scale(-1.0),
    ),
    "groups": lambda: optax.multi_transform(
        {True: optax.adagrad(0.1, eps=1e-3), False: optax.sgd(0.1)}, TREE
    ),
}


@functools.cache
def gradient():
    return jax.jit(jax.value_and_grad(tiny_lm.loss))


def by_whole_gradients(tx, steps, params, loss_gradient=None):
    """Parameters and state, and the losses, with the gradient of the whole loss."""
    state, update, losses = tx.init(params), jax.jit(tx.update), []
    for seed in range(steps):
        value, found = (loss_gradient or gradient())(params, tokens(seed))
        assert min(float(np.abs(g).max()) for g in jax.tree.leaves(found)) > 0
        updates, state = update(found, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(value)
    return params, state, losses


def state_and_losses(step, state, steps):
    ((params, optimizer), metrics), kinds = train(step, state, steps)
    return (params, optimizer, [row["loss"] for row in metrics]), kinds


@functools.cache
def resident(name):
    """What whole gradients make in some steps, and what a resident state does."""
    tx = CASES[name]()
    step, want = tiny_lm.released(tx), by_whole_gradients(tx, STEPS, parameters())
    assert moved(want[0]) > 1e-4
    state = step.init(parameters())
    # The state is a tree as the transformation makes it of the whole parameters.
    assert jax.tree.structure(state[1]) == jax.tree.structure(want[1])
    found, kinds = state_and_losses(step, state, STEPS)
    assert kinds == [{"device"}]
    return want, found


@pytest.mark.quick("0-adamw", "3-lion", "3-nesterov")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("persist", [0, 1, LAYERS - 1])
def test_values_are_those_of_whole_gradients_and_of_a_resident_state(name, persist):
    step, (want, near) = tiny_lm.released(CASES[name]()), resident(name)
    close(near, want)
    found, kinds = state_and_losses(step, step.split(step.init(parameters()), persist), STEPS)
    assert kinds == split_at(persist)
    close(found, want)


@pytest.mark.quick("adamw-3")
@pytest.mark.parametrize("persist", [0, 1, LAYERS - 1])
@pytest.mark.parametrize("name", CASES)
def test_no_bit_depends_on_where_states_lie(name, persist, optimized):
    no_bit_depends(tiny_lm.released(CASES[name]()), persist, STEPS)


@pytest.mark.quick("adamw-1")
@pytest.mark.parametrize("persist", [0, 1, LAYERS - 1])
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_no_bit_depends_on_where_states_lie_if_the_norm_is_clipped(name, persist, optimized):
    no_bit_depends(tiny_lm.released(CASES[name](), clip=("norm", 0.1)), persist, 4)


@pytest.mark.quick("a schedule and a mask's tree", "hyperparameters in the state")
@pytest.mark.parametrize("name", COMPOSED)
def test_schedules_masks_and_chains_are_those_of_whole_gradients(name):
    tx = COMPOSED[name]()
    step = tiny_lm.released(tx)
    want = by_whole_gradients(tx, 5, parameters())
    assert moved(want[0]) > 1e-5
    for persist in (1, LAYERS):
        found, _ = state_and_losses(step, step.split(step.init(parameters()), persist), 5)
        close(found, want)


def test_a_transformation_is_traced_once():
    traced, sgd = [], optax.sgd(0.1)

    def update(*arguments):
        traced.append(arguments)
        return sgd.update(*arguments)

    step = tiny_lm.released(optax.GradientTransformation(sgd.init, update))
    state = step.init(parameters())
    for seed in range(2):
        state, _ = jax.jit(step)(state, tokens(seed))
    assert len(traced) == 1
    step.check(jax.tree.map(lambda a: a.astype(jnp.float16), state))
    assert len(traced) == 2, "other dtypes are traced"


def unstacked(params):
    layers = [jax.tree.map(lambda a, i=i: a[i], params["blocks"]) for i in range(LAYERS)]
    return params | {"blocks": layers}


def stacked(params):
    return params | {"blocks": jax.tree.map(lambda *a: jnp.stack(a), *params["blocks"])}


@pytest.mark.quick("tx1", "tx3")
@pytest.mark.parametrize(
    "tx",
    [
        optax.lamb(0.01, eps=1e-3),
        optax.adafactor(0.01, min_dim_size_to_factor=16, multiply_by_parameter_scale=False),
        optax.contrib.muon(0.01),
        optax.adamw(0.01, eps=1e-3, weight_decay=3.0, mask=by_name),
    ],
)
def test_what_is_counted_per_array_is_a_layers(tx):
    """As of a model whose layers are arrays of their own."""
    loss = lambda params, batch: tiny_lm.loss(stacked(params), batch)
    params, _, _ = by_whole_gradients(
        tx, 3, unstacked(parameters()), jax.jit(jax.value_and_grad(loss))
    )
    step = tiny_lm.released(tx)
    ((found, _), _), _ = train(step, step.split(step.init(parameters()), 1), 3)
    close(found, stacked(params), 1e-5)


@pytest.mark.parametrize(
    ("clip", "chained"),
    [(("value", 0.01), optax.clip(0.01)), (("norm", 0.1), optax.clip_by_global_norm(0.1))],
)
def test_clipping_is_that_of_whole_gradients(clip, chained):
    tx = optax.sgd(0.1, momentum=0.9)
    step = tiny_lm.released(tx, clip=clip)
    want = by_whole_gradients(optax.chain(chained, tx), 3, parameters())
    ((params, _), _), _ = train(step, step.split(step.init(parameters()), 1), 3)
    close(params, want[0])


@pytest.mark.quick("2-clip1", "4-None")
@pytest.mark.parametrize("clip", [None, ("component", 1.0), ("norm", 1.0)])
@pytest.mark.parametrize("persist", [2, LAYERS])
def test_a_layer_whose_gradient_is_not_finite_stays_as_it_was(persist, clip):
    params = parameters()
    params["blocks"]["root"] = jnp.asarray([1.0, 0.0, 1.0, 1.0])
    tx = optax.adamw(0.01, weight_decay=0.1)
    step = tiny_lm.released(tx, tiny_lm.rooted, clip=clip)
    # Moments that are not zero, so that a decay would show.
    moments = jax.tree.map(lambda a: a + 1 if a.ndim else a, step.init(params)[1])
    before = jax.tree.map(np.asarray, (params, moments))
    state, metrics = jax.jit(step)(step.split((params, moments), persist), tokens(0))
    after = jax.tree.map(np.asarray, step.joined(state))
    assert metrics["skipped_layers"].tolist() == [0, 1, 0, 0]
    assert int(metrics["skipped"]) == 1
    of_layers = lambda state: [t["blocks"] for t in (state[0], state[1][0].mu, state[1][0].nu)]
    changed = jax.tree.map(
        lambda a, b: (a != b).reshape(LAYERS, -1).any(1).tolist(), *map(of_layers, (before, after))
    )
    assert changed[0]["up"] == changed[1]["up"] == changed[2]["down"] == [True, False, True, True]
    assert after[1][0].count == 1, "a counter belongs to no layer"
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(after))


def test_hyperparameters_stand_in_the_state_once_and_are_set_there():
    step = tiny_lm.released(optax.inject_hyperparams(optax.sgd)(0.1))
    params, optimizer = step.split(step.init(parameters()), 1)
    assert optimizer.hyperparams["learning_rate"].shape == ()
    optimizer.hyperparams["learning_rate"] = jnp.float32(0.0)
    (new, _), _ = jax.jit(step)((params, optimizer), tokens(0))
    close(step.joined((new, optimizer))[0], parameters(), 0.0)


@pytest.mark.quick("2")
@pytest.mark.parametrize("persist", [0, 2, LAYERS])
def test_a_state_is_made_in_its_places_as_it_is_split(persist):
    tx = optax.chain(optax.zero_nans(), optax.contrib.schedule_free_sgd(0.1, b1=0.9))
    step = tiny_lm.released(tx)
    layer, outer = apart(parameters())
    made = step.create(outer, layer, LAYERS, persist)
    want = step.split(step.init(parameters()), persist)
    assert jax.tree.structure(made) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, made, want)
    kinds = lambda tree: [a.sharding.memory_kind for a in jax.tree.leaves(tree)]
    assert kinds(made) == kinds(want)
    # What is one number a layer stays near.
    near = [a for a in jax.tree.leaves(made[1]) if a.ndim < 2]
    assert {a.shape for a in near} >= {(LAYERS - persist or LAYERS,)}
    assert {a.sharding.memory_kind for a in near} == {"device"}
    shapes = step.split(jax.eval_shape(lambda: step.init(parameters())), persist)
    assert kinds(shapes) == kinds(want)
    new, _ = jax.jit(step, donate_argnums=0)(made, tokens(0))
    # What the update does not read, such as which gradients had a NaN, is not donated.
    assert all(a.is_deleted() for a in jax.tree.leaves(made) if a.ndim > 2)
    assert kinds(new) == kinds(want)


GROUPS = optax.multi_transform(
    {True: optax.normalize_by_update_norm(), False: optax.sgd(0.1)}, TREE
)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax.apply_if_finite(optax.sgd(0.1), 3), r"`params\['blocks'\].*` and .*\['up'\]"),
        (optax.normalize_by_update_norm(), "an update in which every array stands alone"),
        (optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), "jaxmem.adama gathers"),
        (GROUPS, r"updates `params\['blocks'\]\['up'\]` and `params\['embedding'\]`"),
        (optax.polyak_sgd(), "missing 1 required .*: 'value'.*needs no `value`"),
        (optax.add_noise(0.1, 0.5, key=0), "draws random numbers"),
        (optax.masked(optax.sgd(0.1), {"w": True}), "fits the parameters' tree"),
    ],
)
def test_what_couples_arrays_or_needs_more_is_refused(tx, message):
    step = tiny_lm.released(tx)
    with pytest.raises(OptimizerError, match=message):
        step.init(parameters())
    layer, outer = apart(parameters())
    with pytest.raises(OptimizerError, match=message):
        step.create(outer, layer, LAYERS)


def test_one_array_alone_does_not_hide_a_norm_over_all():
    step = tiny_lm.released(optax.normalize_by_update_norm())
    with pytest.raises(OptimizerError, match="stands alone"):
        step.init({"blocks": {"w": jnp.ones((2, 3))}})


def test_wrong_states_and_names_are_refused():
    step = tiny_lm.released(optax.sgd(0.1, momentum=0.9))
    params, _ = step.init(parameters())
    other = optax.adam(0.1).init(params)
    with pytest.raises(OptimizerError, match="state has 13 arrays, and `tx` makes 6"):
        step((params, other), tokens(0))
    with pytest.raises(OptimizerError, match="'moments' beside an optax transformation"):
        tiny_lm.released(optax.lion(0.1), axis_name="data").specs(params, 8, "moments")
    for tx in (optax.lamb(0.1), optax.adafactor(0.1, min_dim_size_to_factor=16)):
        with pytest.raises(OptimizerError, match="needs others of the same array"):
            tiny_lm.released(tx, axis_name="data").specs(params, 8, "states")
    with pytest.raises(OptimizerError, match="`axis_name` is 'data', and that of `tx` is None"):
        tiny_lm.released(jaxmem.adama(0.1), axis_name="data")
    with pytest.raises(OptimizerError, match="specs: the optimizer has no `axis_name`"):
        step.specs(params, 8)

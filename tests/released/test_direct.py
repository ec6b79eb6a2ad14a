"""Released steps with optax's transformations: whole gradients' values, wherever states lie."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem._core.actions import Choice
from jaxmem._core.assignment import Assignment
from jaxmem._model.states.layout import Stacks
from jaxmem.errors import OptimizerError
from tests.shared import tiny_lm
from tests.shared.marks import slow

pytestmark = [
    pytest.mark.core,
    pytest.mark.jax_defaults,
]
LAYERS, STEPS = 4, 20
# As in test_streamed.py: programs of jaxlib 0.10 round alike under these.
ALIKE = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else None


def parameters():
    return tiny_lm.parameters(np.float32, layers=LAYERS, width=32, vocab=64)


def tokens(seed):
    return tiny_lm.tokens(8, seed, vocab=64).astype(jnp.int32)


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


def train(step, state, steps, options=None):
    """The state, joined, and the losses; and in which memories the layers' parameters lie."""
    call, losses = jax.jit(step, donate_argnums=0, compiler_options=options), []
    for seed in range(steps):
        state, metrics = call(state, tokens(seed))
        losses.append(metrics["loss"])
    layers = state[0]["blocks"]
    parts = layers.parts if isinstance(layers, Stacks) else (layers,)
    kinds = [{a.sharding.memory_kind for a in jax.tree.leaves(part)} for part in parts]
    params, optimizer = jax.tree.map(np.asarray, step.joined(state))
    return (params, optimizer, losses), kinds


def same_bits(got, want):
    jax.tree.map(np.testing.assert_array_equal, got[:2], want[:2])


def close(got, want, rtol=1e-6):
    """Within `rtol` of each array's largest value."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(1e-3, np.abs(b).max()))


@functools.cache
def resident(name):
    """What whole gradients make in some steps, and what a resident state does."""
    tx = CASES[name]()
    step, want = tiny_lm.released(tx), by_whole_gradients(tx, STEPS, parameters())
    assert min(jax.tree.leaves(moved(want[0]))) > 1e-4
    state = step.init(parameters())
    # The state is a tree as the transformation makes it of the whole parameters.
    assert jax.tree.structure(state[1]) == jax.tree.structure(want[1])
    found, kinds = train(step, state, STEPS)
    assert kinds == [{"device"}]
    return want, found


@pytest.mark.quick("adamw-0", "lion-3", "nesterov-3")
@pytest.mark.parametrize(
    ("name", "persist"),
    [
        ("adamw", 0),
        *((name, LAYERS - 1) for name in CASES),
        *(slow(name, persist) for name in CASES for persist in (0, 1) if name != "adamw"),
        slow("adamw", 1),
    ],
)
def test_values_are_those_of_whole_gradients_and_of_a_resident_state(name, persist):
    step, (want, near) = tiny_lm.released(CASES[name]()), resident(name)
    close(near, want)
    found, kinds = train(step, step.split(step.init(parameters()), persist), STEPS)
    assert kinds == [{"device"}, {"pinned_host"}][persist == 0 :]
    close(found, want)


@pytest.mark.parametrize("persist", [slow(0), slow(1), LAYERS - 1])
@pytest.mark.parametrize("name", [k if k == "adamw" else slow(k) for k in CASES])
def test_no_bit_depends_on_where_states_lie(name, persist, optimized):
    step = tiny_lm.released(CASES[name]())
    state = lambda: step.split(step.init(parameters()), persist)
    found, kinds = train(step, state(), STEPS, ALIKE)
    assert kinds == [{"device"}, {"pinned_host"}][persist == 0 :]
    # The same split, all of it in device memory.
    on_device = lambda a: jax.device_put(a, a.sharding.with_memory_kind("device"))
    near = step.init(parameters()) if persist == 0 else jax.tree.map(on_device, state())
    same, kinds = train(step, near, STEPS, ALIKE)
    assert set().union(*kinds) == {"device"}
    same_bits(found, same)


def moved(params):
    return jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), params, parameters())


@pytest.mark.quick("a schedule and a mask's tree", "hyperparameters in the state")
@pytest.mark.parametrize("name", COMPOSED)
def test_schedules_masks_and_chains_are_those_of_whole_gradients(name):
    tx = COMPOSED[name]()
    step = tiny_lm.released(tx)
    want = by_whole_gradients(tx, 5, parameters())
    assert min(jax.tree.leaves(moved(want[0]))) > 1e-5
    for persist in (1, LAYERS):
        found, _ = train(step, step.split(step.init(parameters()), persist), 5)
        close(found, want)


def test_plans_keys_and_auxiliary_outputs_go_with_it():
    def block(p, x, *shared, key):
        y = tiny_lm.block(p, x, *shared, key=key)
        return y, (y * y).mean()

    def head(outer, x, aux, batch):
        return tiny_lm.head(outer, x, batch) + 0.1 * (aux**2).sum()

    def loss(params, batch, key):
        own = lambda i: {"key": jax.random.fold_in(key, i)}
        x, *shared = tiny_lm.embed(params, batch, **own(LAYERS))
        found = []
        for i in range(LAYERS):
            x, aux = block(
                jax.tree.map(lambda a, i=i: a[i], params["blocks"]), x, *shared, **own(i)
            )
            found.append(aux)
        return head(params, x, jnp.stack(found), batch)

    plan = Assignment(
        {
            "block[0:3]": {"in": Choice("recompute"), "up": Choice("recompute")},
            "block[3:4]": {"in": Choice("keep"), "up": Choice("keep")},
        }
    )
    tx, key = optax.sgd(0.1, momentum=0.9), jax.random.key(3)
    arguments = {"layers": "blocks", "has_aux": True, "plan": plan}
    step = jaxmem.released_step(tx, tiny_lm.embed, block, head, **arguments)
    state, metrics = jax.jit(step)(step.split(step.init(parameters()), 2), tokens(0), key)
    value, found = jax.jit(jax.value_and_grad(loss))(
        parameters(), tokens(0), jax.random.fold_in(key, 0)
    )
    want = optax.apply_updates(parameters(), tx.update(found, tx.init(found))[0])
    close(step.joined(state)[0], want)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(found), rtol=1e-5)


def test_layers_may_compute_in_bfloat16_and_the_state_stays_as_it_was():
    wide = lambda outer, x, batch: tiny_lm.head(outer, x.astype("float32"), batch)
    near = lambda outer, batch: tuple(a.astype("bfloat16") for a in tiny_lm.embed(outer, batch))
    tx = optax.lion(3e-3, mu_dtype="bfloat16")
    step = jaxmem.released_step(tx, near, tiny_lm.block, wide, layers="blocks", dtype="bfloat16")
    state, found = step.split(step.init(parameters()), 1), []
    dtypes = lambda tree: [a.dtype for a in jax.tree.leaves(tree)]
    before, call = dtypes(state), jax.jit(step, donate_argnums=0)
    for _ in range(20):
        state, metrics = call(state, tokens(0))
        found.append(float(metrics["loss"]))
    assert dtypes(state) == before
    assert {str(a.dtype) for a in jax.tree.leaves(state[1]) if a.ndim > 1} == {"bfloat16"}
    assert found[-1] < found[0] - 0.1


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
        slow(optax.contrib.muon(0.01)),
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
    (found, _, _), _ = train(step, step.split(step.init(parameters()), 1), 3)
    close(found, stacked(params), 1e-5)


@pytest.mark.parametrize(
    ("clip", "chained"),
    [(("value", 0.01), optax.clip(0.01)), (("norm", 0.1), optax.clip_by_global_norm(0.1))],
)
def test_clipping_is_that_of_whole_gradients(clip, chained):
    tx = optax.sgd(0.1, momentum=0.9)
    step = tiny_lm.released(tx, clip=clip)
    want = by_whole_gradients(optax.chain(chained, tx), 3, parameters())
    (params, _, _), _ = train(step, step.split(step.init(parameters()), 1), 3)
    close(params, want[0])


def test_a_component_is_clipped_to_its_own_norm():
    step = tiny_lm.released(optax.sgd(1.0), clip=("component", 0.003))
    (params, _, _), _ = train(step, step.split(step.init(parameters()), 1), 1)
    change = jax.tree.map(lambda a, b: np.asarray(a - b, np.float64), params, parameters())
    blocks = change.pop("blocks")
    norms = np.sqrt(sum((a**2).sum((1, 2)) for a in jax.tree.leaves(blocks)))
    np.testing.assert_allclose(norms, [0.003] * LAYERS, rtol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(change["embedding"]), 0.003, rtol=1e-3)


@pytest.mark.quick("clip1-2", "None-4")
@pytest.mark.parametrize(
    ("clip", "persist"),
    [
        *((clip, 2) for clip in (None, ("component", 1.0), ("norm", 1.0))),
        (None, LAYERS),
        slow(("component", 1.0), LAYERS),
        slow(("norm", 1.0), LAYERS),
    ],
)
def test_a_layer_whose_gradient_is_not_finite_stays_as_it_was(persist, clip):
    def rooted(p, x, *shared, key=None):
        return tiny_lm.block(p, x, *shared) + 0 * jnp.sqrt(p["root"])

    params = parameters()
    params["blocks"]["root"] = jnp.asarray([1.0, 0.0, 1.0, 1.0])
    tx = optax.adamw(0.01, weight_decay=0.1)
    step = jaxmem.released_step(tx, tiny_lm.embed, rooted, tiny_lm.head, layers="blocks", clip=clip)
    # Moments that are not zero, so that a decay would show.
    moments = jax.tree.map(lambda a: a + 1 if a.ndim else a, step.init(params)[1])
    before = jax.tree.map(np.asarray, (params, moments))
    state, metrics = jax.jit(step)(step.split((params, moments), persist), tokens(0))
    after = jax.tree.map(np.asarray, step.joined(state))
    assert metrics["skipped_layers"].tolist() == [0, 1, 0, 0]
    assert int(metrics["skipped"]) == 1
    of_layers = lambda state: [
        state[0]["blocks"],
        state[1][0].mu["blocks"],
        state[1][0].nu["blocks"],
    ]
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
    params = parameters()
    layers, outer = params["blocks"], {k: v for k, v in params.items() if k != "blocks"}
    layer = lambda i: jax.tree.map(lambda a: a[i], layers)
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


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (
            optax.apply_if_finite(optax.sgd(0.1), 3),
            r"updates `params\['blocks'\]\['down'\]` and .*\['up'\]` by each other",
        ),
        (optax.normalize_by_update_norm(), "expected an update in which every array stands alone"),
        (
            optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
            "jaxmem.adama gathers microbatches",
        ),
        (
            optax.multi_transform(
                {True: optax.normalize_by_update_norm(), False: optax.sgd(0.1)}, TREE
            ),
            r"updates `params\['blocks'\]\['up'\]` and `params\['embedding'\]`",
        ),
        (optax.polyak_sgd(), "missing 1 required keyword-only argument: 'value'.*needs no `value`"),
        (optax.add_noise(0.1, 0.5, key=0), "draws random numbers"),
        (optax.masked(optax.sgd(0.1), {"w": True}), "fits the parameters' tree"),
    ],
)
def test_what_couples_arrays_or_needs_more_is_refused(tx, message):
    step = tiny_lm.released(tx)
    with pytest.raises(OptimizerError, match=message):
        step.init(parameters())
    params = parameters()
    outer = {k: v for k, v in params.items() if k != "blocks"}
    with pytest.raises(OptimizerError, match=message):
        step.create(outer, lambda i: jax.tree.map(lambda a: a[i], params["blocks"]), LAYERS)


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

"""released_step(): Algorithm 1's parameters without ever holding a gradient, clipped, masked and
refused.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict

import jaxmem
from jaxmem._core.actions import Choice
from jaxmem._core.assignment import Assignment
from jaxmem.errors import OptimizerError
from tests.shared import adama_oracle, row_oracle, tiny_lm
from tests.shared.refused import refused

recomputed = Assignment({"block": dict.fromkeys(("in", "up"), Choice("recompute"))})
grouped = Assignment(
    {
        "block[0:1]": recomputed.actions["block"],
        "block[1:3]": {"in": Choice("keep"), "up": Choice("keep")},
    }
)

# Two layers in a span, and one layer after it.
spanned = Assignment({"block[0:3:2]": {"in": Choice("keep"), "up": Choice("recompute")}})


def schedule(count):
    return 0.03 / (1.0 + count)


def run(step, params, batches, key=None):
    state, call, found = step.init(params), jax.jit(step), []
    for batch in batches:
        state, metrics = call(state, batch, *(() if key is None else (key,)))
        found.append(metrics)
    return state, found


@functools.cache
def gradient_of(loss):
    """Loss and gradient, compiled once for all tests of a batch's shape."""
    return jax.jit(jax.value_and_grad(loss))


def by_transform(tx, params, batches, n, key=None, loss=tiny_lm.loss):
    """The same with whole gradients, one `tx.update` a microbatch."""
    state, update = tx.init(params), jax.jit(tx.update)
    for batch in batches:
        for i, part in enumerate(batch.reshape(n, -1, *batch.shape[1:])):
            own = () if key is None else (jax.random.fold_in(key, i),)
            updates, state = update(gradient_of(loss)(params, part, *own)[1], state, params)
            params = optax.apply_updates(params, updates)
    return params, state


def close(got, want, rtol=1e-12):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-15), got, want)


@pytest.mark.quick("3-squares", "3-row")
@pytest.mark.parametrize("second_moment", ["squares", "row"])
@pytest.mark.parametrize("n", [1, 3])
def test_it_agrees_with_algorithm_1_over_50_steps_tied_embeddings_decay_and_schedule(
    n, second_moment
):
    params, batches = tiny_lm.parameters(), [tiny_lm.tokens(6, seed) for seed in range(50)]
    options = {"weight_decay": 0.05, "accumulation_steps": n, "second_moment": second_moment}
    tx = jaxmem.adamaw_a(schedule, 0.8, 0.97, **options)
    leaves, structure = jax.tree.flatten(params)

    def of(part):
        tree = lambda leaves: jax.tree.unflatten(structure, list(map(jnp.asarray, leaves)))
        return lambda leaves: jax.tree.leaves(gradient_of(tiny_lm.loss)(tree(leaves), part)[1])

    microbatches = [list(map(of, batch.reshape(n, -1, batch.shape[1]))) for batch in batches]
    oracle = {"squares": adama_oracle, "row": row_oracle}[second_moment]
    want = oracle.adama(leaves, microbatches, schedule, 0.8, 0.97, decay=0.05)[-1]
    (got, state), _ = run(tiny_lm.released(tx), params, batches)
    close(jax.tree.leaves(got), want)
    assert (int(state.count), int(state.folded)) == (50, 0)


@pytest.mark.quick("plan1-squares", "plan3-row")
@pytest.mark.parametrize(
    ("plan", "second_moment"),
    [
        (None, "squares"),
        (recomputed, "squares"),
        (grouped, "squares"),
        (grouped, "row"),
        (spanned, "squares"),
        (spanned, "row"),
    ],
)
def test_a_plan_and_dropout_change_nothing_else(plan, second_moment):
    params, key = tiny_lm.parameters(), jax.random.key(5)
    batches = [tiny_lm.tokens(4, seed) for seed in range(2)]
    tx = jaxmem.adama(0.01, accumulation_steps=2, second_moment=second_moment)
    got, found = run(tiny_lm.released(tx, plan=plan), params, batches, key)
    close(got, by_transform(tx, params, batches, 2, key))
    assert float(found[-1]["loss"]) < 3
    own = lambda part, i: gradient_of(tiny_lm.loss)(params, part, jax.random.fold_in(key, i))
    losses, gradients = zip(*map(own, batches[0].reshape(2, 2, -1), range(2)))
    np.testing.assert_allclose(found[0]["loss"], np.mean(losses))
    norms = list(map(optax.tree.norm, gradients))
    np.testing.assert_allclose(found[0]["grad_norm"], np.sqrt(np.mean(np.square(norms))))


def clip_components(at):
    """As ("component", at): each layer, and each array outside."""

    def update(updates, state, params=None):
        shrink = lambda norm: jnp.minimum(1.0, at / norm)
        per_layer = jnp.sqrt(sum((g**2).sum((1, 2)) for g in jax.tree.leaves(updates["blocks"])))
        new = {k: g * shrink(jnp.linalg.norm(g)) for k, g in updates.items() if k != "blocks"}
        of_layers = lambda g: g * shrink(per_layer)[:, None, None]
        return new | {"blocks": jax.tree.map(of_layers, updates["blocks"])}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.quick("clip0-chained0-squares", "clip2-chained2-row", "clip3-chained3-squares")
@pytest.mark.parametrize(
    ("clip", "chained", "second_moment"),
    [
        (("value", 0.01), optax.clip(0.01), "squares"),
        (("component", 0.1), clip_components(0.1), "squares"),
        (("component", 0.1), clip_components(0.1), "row"),
        (("norm", 0.1), optax.clip_by_global_norm(0.1), "squares"),
        (("norm", 0.1), optax.clip_by_global_norm(0.1), "row"),
        (("norm", 1e6), optax.identity(), "squares"),
    ],
)
def test_clipping_is_that_of_whole_gradients(clip, chained, second_moment):
    params, batches = tiny_lm.parameters(), [tiny_lm.tokens(4, seed) for seed in range(3)]
    # a larger eps, so that the gradient's size matters
    tx = jaxmem.adama(0.01, eps=1e-3, accumulation_steps=2, second_moment=second_moment)
    (got, _), found = run(tiny_lm.released(tx, clip=clip), params, batches)
    want, _ = by_transform(optax.chain(chained, tx), params, batches, 2)
    close(got, want)
    if clip[1] < 1:
        assert float(found[0]["grad_norm"]) > clip[1], "it clips"


def left_out(step, params):
    """Asserts that a step of two microbatches leaves out, and counts, the gradients of the second
    layer. Returns the new parameters.
    """
    (new, state), (metrics,) = run(step, params, [tiny_lm.tokens(4)])
    assert metrics["skipped_layers"].tolist() == [0, 2, 0]
    assert int(metrics["skipped"]) == 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((new, state, metrics)))
    moved = np.abs(np.asarray(new["blocks"]["up"] - params["blocks"]["up"])).max((1, 2)) > 0
    assert moved.tolist() == [True, False, True]
    return new


@pytest.mark.quick("clip2-squares", "clip3-row")
@pytest.mark.parametrize(
    ("clip", "second_moment"),
    [
        (None, "squares"),
        (None, "row"),
        (("value", 1.0), "squares"),
        (("component", 1.0), "row"),
        (("norm", 1.0), "squares"),
    ],
)
def test_what_is_not_finite_is_left_out_a_layer_at_a_time_and_counted(clip, second_moment):
    params = tiny_lm.parameters()
    params["blocks"]["root"] = jnp.asarray([1.0, 0.0, 1.0])
    tx = jaxmem.adama(0.01, accumulation_steps=2, second_moment=second_moment)
    step = tiny_lm.released(tx, tiny_lm.rooted, clip=clip)
    new = left_out(step, params)
    assert (new["embedding"] != params["embedding"]).any()


@jax.custom_vjp
def steep(root):
    """`root`, whose gradient is finite and too large to be squared where it is 2."""
    return root


steep.defvjp(lambda r: (r, r), lambda r, t: (jnp.where(r == 2, 1e200, 1) * t,))


def test_a_finite_gradient_whose_square_overflows_is_left_out_and_counted():
    params = tiny_lm.parameters()
    params["blocks"]["root"] = jnp.asarray([1.0, 2.0, 1.0])

    def layer(p, x, *shared, key=None):
        return tiny_lm.block(p, x, *shared) * steep(p["root"])

    def of_roots(roots):
        own = {**params, "blocks": {**params["blocks"], "root": roots}}
        x, *shared = tiny_lm.embed(own, tiny_lm.tokens(4))
        for i in range(3):
            x = layer(jax.tree.map(lambda a, i=i: a[i], own["blocks"]), x, *shared)
        return tiny_lm.head(own, x, tiny_lm.tokens(4))

    gradient = jax.grad(of_roots)(params["blocks"]["root"])
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).min() > 0
    tx = jaxmem.adama(0.01, accumulation_steps=2)
    left_out(tiny_lm.released(tx, layer), params)


def test_layers_of_numbers_have_rows_of_their_own():
    """A stack of one number a layer, as `root` is: by the transformation it would be one row."""
    params, tx = tiny_lm.parameters(), jaxmem.adama(0.01, second_moment="row")
    params["blocks"]["root"] = jnp.ones(3)
    _, state = tiny_lm.released(tx, tiny_lm.rooted).init(params)
    assert state.square["blocks"]["root"].shape == (3,)
    assert state.square["blocks"]["up"].shape == (3, tiny_lm.WIDTH)
    assert state.square["embedding"].shape == (tiny_lm.VOCAB,)
    assert state.square["final"].shape == ()


def test_auxiliary_outputs_reach_the_head():
    def block(p, x, *shared):
        y = tiny_lm.block(p, x, *shared)
        return y, (y * y).mean()

    def head(outer, x, aux, batch):
        return tiny_lm.head(outer, x, batch) + 0.1 * aux.sum()

    def loss(params, batch):
        x, *shared = tiny_lm.embed(params, batch)
        found = []
        for i in range(tiny_lm.LAYERS):
            x, aux = block(jax.tree.map(lambda a, i=i: a[i], params["blocks"]), x, *shared)
            found.append(aux)
        return head(params, x, jnp.stack(found), batch)

    params, batches = tiny_lm.parameters(), [tiny_lm.tokens(4)]
    tx = jaxmem.adama(0.01, accumulation_steps=2)
    step = jaxmem.released_step(tx, tiny_lm.embed, block, head, layers="blocks", has_aux=True)
    got, _ = run(step, params, batches)
    close(got, by_transform(tx, params, batches, 2, loss=loss))


def test_layers_may_compute_in_bfloat16_and_moments_be_stored_in_it():
    params, batches = tiny_lm.parameters(np.float32), [tiny_lm.tokens(4)] * 20
    tx = jaxmem.adama(0.01, mu_dtype="bfloat16", accumulation_steps=2)
    step = jaxmem.released_step(
        tx,
        lambda outer, batch: tuple(a.astype("bfloat16") for a in tiny_lm.embed(outer, batch)),
        tiny_lm.block,
        lambda outer, x, batch: tiny_lm.head(outer, x.astype("float32"), batch),
        layers="blocks",
        dtype="bfloat16",
    )
    (new, state), found = run(step, params, batches)
    assert {a.dtype for a in jax.tree.leaves(new)} == {jnp.dtype("float32")}
    assert {a.dtype for a in jax.tree.leaves(state.mu)} == {jnp.dtype("bfloat16")}
    assert {a.dtype for a in jax.tree.leaves(state.nu)} == {jnp.dtype("float32")}
    exact, _ = run(tiny_lm.released(jaxmem.adama(0.01, accumulation_steps=2)), params, batches)
    for a, b, before in zip(*map(jax.tree.leaves, (new, exact[0], params))):
        assert float(jnp.abs(a - b).mean()) < 0.3 * float(jnp.abs(b - before).mean())
    assert float(found[-1]["loss"]) < float(found[0]["loss"])


@refused(
    OptimizerError,
    (optax.chain(optax.clip_by_global_norm(1.0), jaxmem.adama(0.1)), "a chain with optax.clip"),
    (optax.MultiSteps(optax.adam(0.1), 2), "`tx` is MultiSteps; expected what jaxmem.adama"),
    (optax.chain(jaxmem.scale_by_adama(), optax.scale(-0.1)), "rates, schedules and decay"),
    (optax.lookahead(optax.sgd(0.1), 5, 0.5), "optax.lookahead.*optax.incremental_update"),
    (optax.chain(optax.clip(1.0), optax.lookahead(optax.adam(0.1), 5, 0.5)), "optax.lookahead"),
    (None, "`tx` is NoneType"),
    (jaxmem.adama(0.1, nesterov=True), "`nesterov`"),
)
def test_an_optimizer_that_cannot_release_is_refused(tx):
    tiny_lm.released(tx)


@pytest.mark.parametrize(
    "clip",
    [1.0, ("norm",), ("global", 1.0), ("value", 0.0), ("value", float("nan")), ("norm", "1")],
)
def test_bad_clips_are_refused(clip):
    with pytest.raises(OptimizerError, match="`clip` is .*expected None or a pair"):
        tiny_lm.released(jaxmem.adama(0.1), clip=clip)


def test_what_does_not_fit_is_refused():
    tx, params = jaxmem.adama(0.1, accumulation_steps=3), tiny_lm.parameters()
    step = tiny_lm.released(tx)
    with pytest.raises(OptimizerError, match="`block` is int; expected a function"):
        jaxmem.released_step(tx, tiny_lm.embed, 3, tiny_lm.head)
    with pytest.raises(OptimizerError, match=r"shape \(4, 6\); .* accumulation_steps = 3"):
        step(step.init(params), tiny_lm.tokens(4))
    with pytest.raises(OptimizerError, match="`params` has 'embedding'; .*no stack"):
        step.init({"embedding": params["embedding"]})
    with pytest.raises(OptimizerError, match="`params` is FrozenDict; expected a dict"):
        step.init(FrozenDict(params))
    with pytest.raises(OptimizerError, match=r"`params\['n'\]` is int64; expected floating-point"):
        step.init(params | {"n": jnp.arange(3)})
    vector = jaxmem.released_step(
        tx, tiny_lm.embed, tiny_lm.block, lambda outer, x, batch: x[0, 0, :3], layers="blocks"
    )
    with pytest.raises(OptimizerError, match=r"`head` returned f.*\[3\]; expected .* mean loss"):
        vector(step.init(params), tiny_lm.tokens(3))
    with pytest.raises(OptimizerError, match="`axis_name` is None, and `mesh` has 'data'"):
        step.data_parallel(jax.make_mesh((1,), ("data",)))

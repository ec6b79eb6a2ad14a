"""Released steps of losses with auxiliary values, of frozen weights, and of nested loops. Losses
that no released step divides, and wrong arguments.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.errors import NoLayersError, OptimizerError
from jaxmem.plans import Assignment
from tests.released.test_loss import (
    LAYERS,
    WIDTH,
    adam,
    feed_forward,
    layer_parameters,
    own,
    plain_step,
    rows,
    trained,
    with_a_counter,
    with_keys_and_rates,
)
from tests.shared.compare import close
from tests.shared.refused import refused

pytestmark = [pytest.mark.core, pytest.mark.standard_promotion]
RANK = 2


def normalized(x, statistics):
    """A batch norm with running statistics, and the new statistics."""
    mean, var = x.mean(0), x.var(0)
    keep = lambda old, new: 0.9 * old + 0.1 * jax.lax.stop_gradient(new)
    new = {"mean": keep(statistics["mean"], mean), "var": keep(statistics["var"], var)}
    return (x - mean) / jnp.sqrt(var + 1e-5), new


STATISTICS = {"mean": jnp.zeros((LAYERS, WIDTH)), "var": jnp.ones((LAYERS, WIDTH))}


def head(params, x, statistics):
    predicted = x @ params["embedding"].T
    right = jnp.argmax(predicted, -1) == jnp.argmax(x, -1)
    reported = {"statistics": statistics, "accuracy": right.mean(), "weight": params["embedding"]}
    return (predicted**2).mean() + (params["shared"] ** 2).sum(), reported | {"one": jnp.ones(())}


def in_a_scan(params, x):
    def layer(x, given):
        p, statistics = given
        x, new = normalized(feed_forward(x, p), statistics)
        return x, new

    x, new = jax.lax.scan(layer, x @ params["embedding"], (own(params), STATISTICS))
    return head(params, x, new)


def in_a_python_loop(params, x):
    x, new = x @ params["embedding"], []
    for i, p in enumerate(params["layers"]):
        x, one = normalized(feed_forward(x, p), jax.tree.map(lambda a, i=i: a[i], STATISTICS))
        new.append(one)
    return head(params, x, new)


def parameters(loss):
    """Every parameter differs from zero."""
    params = layer_parameters()
    if loss is in_a_scan:
        return params
    layers = [jax.tree.map(lambda a, i=i: a[i], own(params)) for i in range(LAYERS)]
    return {k: params[k] for k in ("embedding", "shared")} | {"layers": layers}


LOSSES = pytest.mark.parametrize("loss", [in_a_scan, in_a_python_loop])


@pytest.mark.quick("None-None-in_a_scan", "plan1-clip1-in_a_python_loop")
@LOSSES
# The norm is below the limit, so that nothing is clipped.
@pytest.mark.parametrize(("plan", "clip"), [(None, None), (Assignment.nothing(), ("norm", 100.0))])
def test_auxiliary_values_equal_the_values_of_the_loss(loss, plan, clip):
    params, x = parameters(loss), rows()
    step = jaxmem.released_step(adam(), loss, has_aux=True, plan=plan, clip=clip)
    (got, _), metrics = jax.jit(step)(step.init(params, x), x)
    value, aux = loss(params, x)
    want, _ = trained(
        plain_step(adam(), lambda *a: loss(*a)[0]), (params, adam().init(params)), (x,), 1
    )
    close(jax.tree.leaves(got), jax.tree.leaves(want[0]))
    assert jax.tree.structure(metrics["aux"]) == jax.tree.structure(aux)
    close(jax.tree.leaves(metrics["aux"]), jax.tree.leaves(aux))
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-12)


@LOSSES
@pytest.mark.parametrize(("persist", "steps"), [(0, 3), (0, 1), (LAYERS, 3)])
def test_values_of_each_microbatch_have_a_leading_axis(loss, persist, steps):
    params, x = parameters(loss), jnp.concatenate([rows(), rows() * 0.5, rows() + 1])[: 8 * steps]
    tx = jaxmem.adama(0.01, eps=1e-4, accumulation_steps=steps)
    step = jaxmem.released_step(tx, loss, has_aux=True)
    split = step.of(params, x).split(step.init(jax.tree.map(jnp.copy, params), x), persist)
    _, metrics = jax.jit(step)(split, x)
    each = [loss(params, part)[1] for part in jnp.split(x, steps)]
    want = jax.tree.map(lambda *a: jnp.stack(a), *each)
    assert jax.tree.structure(metrics["aux"]) == jax.tree.structure(want)
    close(*(jax.tree.map(np.asarray, jax.device_get(a)) for a in (metrics["aux"], want)))


def frozen_weights(params, x):
    """LoRA: the layers' whole weights are closed over, and low-rank products are trained."""
    whole = layer_parameters()

    def layer(x, given):
        weights, p = given
        up = x @ weights["up"] + (x @ p["a"]) @ p["b"]
        return x + jnp.tanh(up) @ weights["down"] + (jnp.tanh(up) @ p["c"]) @ p["d"], None

    x, _ = jax.lax.scan(layer, x @ whole["embedding"], (own(whole), params["layers"]))
    return ((x @ params["head"]) ** 2).mean()


def local_and_global(params, x):
    """Groups of two local layers and a global layer, and two layers after them."""

    def group(x, p):
        x, _ = jax.lax.scan(lambda x, q: (feed_forward(x, q), None), x, p["local"])
        return feed_forward(x, p["global"]), None

    x, _ = jax.lax.scan(group, x, params["groups"])
    x, _ = jax.lax.scan(lambda x, q: (feed_forward(x, q), None), x, params["tail"])
    return ((x @ params["head"]) ** 2).mean()


def normal(shapes):
    keys = iter(jax.random.split(jax.random.key(4), 20))
    make = lambda shape: jax.random.normal(next(keys), shape) / 5
    return jax.tree.map(make, shapes, is_leaf=lambda a: isinstance(a, tuple))


def weights(*axes):
    return {"up": (*axes, WIDTH, 2 * WIDTH), "down": (*axes, 2 * WIDTH, WIDTH)}


def low_rank():
    shapes = {
        "a": (WIDTH, RANK),
        "b": (RANK, 2 * WIDTH),
        "c": (2 * WIDTH, RANK),
        "d": (RANK, WIDTH),
    }
    return {k: (LAYERS, *shape) for k, shape in shapes.items()}


SHAPES = {
    frozen_weights: {"layers": low_rank(), "head": (WIDTH, 3)},
    local_and_global: {
        "groups": {"local": weights(3, 2), "global": weights(3)},
        "tail": weights(2),
        "head": (WIDTH, 3),
    },
}


@pytest.mark.parametrize("plan", [None, Assignment.nothing()])
@pytest.mark.parametrize("loss", SHAPES)
def test_ten_steps_are_those_of_the_plain_step(loss, plan):
    params, x = normal(SHAPES[loss]), rows()
    step = jaxmem.released_step(adam(), loss, plan=plan)
    state = step.init(params, x)
    got, _ = trained(step, state, (x,), 10)
    want, _ = trained(plain_step(adam(), loss), (params, adam().init(params)), (x,), 10)
    close(jax.tree.leaves(got), jax.tree.leaves(want), 1e-12)
    changed = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (got[0], params)))]
    assert min(changed) > 0


@refused(
    OptimizerError,
    (lambda params, x: (x.mean(), x), False, "has_aux=True for a pair"),
    (lambda params, x: x.mean(), True, "and a tree of arrays"),
    (lambda params, x: (x, x), True, "and a tree of arrays"),
)
def test_another_result_is_refused(loss, has_aux):
    jaxmem.released_step(adam(), loss, has_aux=has_aux).init(layer_parameters(), rows())


def reversed_layers(params, x):
    layer = lambda x, p: (feed_forward(x, p), None)
    return (jax.lax.scan(layer, x, own(params), reverse=True)[0] ** 2).mean()


def unrolled(params, x):
    for i in range(LAYERS):
        x = feed_forward(x, jax.tree.map(lambda a, i=i: a[i], own(params)))
    return (x**2).mean()


def towers(params, x):
    """Two equal towers, each a scan over its layers."""
    layer = lambda x, p: (feed_forward(x, p), None)
    ends = [jax.lax.scan(layer, x, tower)[0] for tower in params["towers"]]
    return ((ends[0] - params["scale"] * ends[1]) ** 2).mean()


def test_layers_of_equal_towers_are_iterations_and_not_the_towers():
    make = lambda factor: {k: factor * a for k, a in own(layer_parameters()).items()}
    params = {"towers": [make(1.0), make(0.8)], "scale": jnp.float64(0.7)}
    step = jaxmem.released_step(adam(), towers)
    got, metrics = trained(step, step.init(jax.tree.map(jnp.copy, params), rows()), (rows(),), 3)
    assert metrics["skipped_layers"].shape == (LAYERS,)
    want, _ = trained(plain_step(adam(), towers), (params, adam().init(params)), (rows(),), 3)
    close(got[0], want[0], 1e-10)


def regularized(params, x):
    layer = lambda x, p: (feed_forward(x, p), None)
    return (jax.lax.scan(layer, x, own(params))[0] ** 2).mean() + (params["up"] ** 2).sum()


def carries_a_key(params, x):
    def layer(carry, p):
        key, x = carry
        key, used = jax.random.split(key)
        return (key, feed_forward(x, p) + jax.random.normal(used, x.shape)), None

    (_, x), _ = jax.lax.scan(layer, (jax.random.key(0), x), own(params))
    return (x**2).mean()


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (reversed_layers, r"the scan at .*test_loss_aux\.py.*it runs backward"),
        (
            unrolled,
            r"Python loop at .*test_loss\.py.* reads a parameter that nothing else",
        ),
        (lambda p, x: (x @ p["embedding"]).mean(), "it has no loop.*stack the layers' parameters"),
        (regularized, r"`params\['up'\]` is sliced by the loop .* and is also read at"),
        (carries_a_key, "carries key.*has no gradient.*slice keys"),
    ],
)
def test_a_loss_that_cannot_be_divided_is_refused(loss, says):
    with pytest.raises(NoLayersError, match=says):
        jaxmem.released_step(adam(), loss).init(layer_parameters(), rows())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: jaxmem.released_step(adam(), "loss"), "`loss` is str; expected a function"),
        (lambda: jaxmem.released_step(adam(), reversed_layers, dtype="bfloat16"), "a whole loss"),
        (
            lambda: jaxmem.released_step(adam(), lambda p, x: (x.mean(), x)).init(
                layer_parameters(), rows()
            ),
            r"`loss` returned .*; expected the microbatch's mean loss",
        ),
        (
            lambda: jaxmem.released_step(
                jaxmem.adama(0.1, accumulation_steps=3), with_a_counter
            ).init(layer_parameters(), {"x": rows()}),
            r"`batch\['x'\]` has shape \(8, 16\); expected a leading axis",
        ),
        (
            lambda: jaxmem.released_step(adam(), with_a_counter)(layer_parameters(), rows()),
            "`state` is dict; expected the pair",
        ),
        (
            lambda: jaxmem.released_step(adam(), with_a_counter).init(
                layer_parameters() | {"count": jnp.int32(0)}, rows()
            ),
            r"`params\['count'\]` is int32; expected floating-point",
        ),
        (
            lambda: jaxmem.released_step(adam(), with_keys_and_rates).init(
                layer_parameters(), rows()
            ),
            r"cannot be called as loss\(params, microbatch\): missing .*'key'",
        ),
        (
            lambda: jaxmem.released_step(adam(), with_a_counter).init(
                layer_parameters(), rows(), jnp.zeros((8, 25), jnp.int32)
            ),
            r"argument after the batch is int32\[8, 25\]; expected a random key.* one argument",
        ),
        (
            lambda: jaxmem.released_step(adam(), with_a_counter).init(
                layer_parameters(), rows(), jax.random.key(0)
            ),
            r"cannot be called as loss\(params, microbatch, key\): too many",
        ),
    ],
)
def test_wrong_arguments_are_named(make, says):
    with pytest.raises(OptimizerError, match=says):
        make()

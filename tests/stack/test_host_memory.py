"""jaxmem.stack over parameters in host memory: values, gradients, and what it folds into."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._model.states.layout import masters_of
from jaxmem.errors import StackError
from tests.released.test_streamed import grouped
from tests.shared import tiny_lm
from tests.shared.streamed import LAYERS, apart, close, parameters, tokens

pytestmark = pytest.mark.jax_defaults


def loss(layers, **how):
    """The loss of a model whose other parameters are `parameters`."""
    _, outer = apart(parameters())
    x, *shared = tiny_lm.embed(outer, tokens(0))
    y = jaxmem.stack(tiny_lm.block, layers, x, *shared, **how)
    return tiny_lm.head(outer, y, tokens(0))


def test_a_stack_reads_its_parameters_from_host_memory():
    step, jitted = tiny_lm.released(jaxmem.adama(0.01)), jax.jit(loss)
    want = jitted(parameters()["blocks"])
    for persist, more in ((0, {}), (1, {}), (LAYERS, {}), (1, {"copies": 2, "buffers": 1})):
        layers = step.split(step.init(parameters()), persist, **more)[0]["blocks"]
        np.testing.assert_allclose(jitted(layers), want, rtol=1e-6)


@pytest.mark.parametrize("how", [{"persist": 1}, {"persist": 1, "buffers": 2}])
@pytest.mark.parametrize("plan", [None, grouped])
def test_a_stack_has_the_gradient_of_parameters_in_host_memory_where_they_are(how, plan):
    step = tiny_lm.released(jaxmem.adama(0.01))
    gradient = jax.jit(jax.grad(functools.partial(loss, plan=plan)))
    want = jax.tree.leaves(gradient(parameters()["blocks"]))
    layers = step.split(step.init(parameters()), **how)[0]["blocks"]
    found = gradient(layers)
    kinds = lambda tree: [a.sharding.memory_kind for a in jax.tree.leaves(tree)]
    assert kinds(found) == kinds(layers)
    for a in want:
        assert np.abs(a).max((1, 2)).min() > 0
    got = zip(*map(jax.tree.leaves, masters_of(found)), strict=True)
    close([np.concatenate(parts) for parts in got], [np.asarray(a) for a in want])


def test_a_stack_with_copies_has_no_gradient_since_they_would_stay_as_they_were():
    step = tiny_lm.released(jaxmem.adama(0.01))
    layers = step.split(step.init(parameters()), 0, copies=2)[0]["blocks"]
    x, *shared = tiny_lm.embed(apart(parameters())[1], tokens(0))
    run = lambda layers: jaxmem.stack(tiny_lm.block, layers, x, *shared).sum()
    assert np.isfinite(run(layers))
    with pytest.raises(StackError, match="has layers with copies, and is differentiated"):
        jax.grad(run)(layers)


def test_integers_in_host_memory_have_no_gradient_and_other_leaves_do():
    params = {"n": jnp.arange(LAYERS), "w": jnp.arange(1.0, LAYERS + 1)}
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    there = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(), memory_kind="pinned_host"
    )
    run = lambda p: jaxmem.stack(lambda p, x: x * p["w"] + p["n"], p, jnp.float32(2.0))
    want = jax.grad(run, allow_int=True)(params)["w"]
    found = jax.grad(run, allow_int=True)(jax.device_put(params, there))["w"]
    assert found.sharding.memory_kind == "pinned_host"
    assert np.abs(want).min() > 0
    np.testing.assert_array_equal(np.asarray(found), np.asarray(want))


def test_moments_that_are_split_as_parameters_are_folded_into():
    step = tiny_lm.released(jaxmem.adama(0.01))

    def folded(layers, moments):
        fold = functools.partial(jax.tree.map, jnp.add)
        return jax.jit(jax.grad(lambda m: loss(layers, moments=m, fold=fold)))(moments)

    zero = jax.tree.map(jnp.zeros_like, parameters()["blocks"])
    want = jax.tree.map(np.asarray, folded(parameters()["blocks"], zero))
    params, moments = step.split(step.init(parameters()), 1)
    got = zip(*map(jax.tree.leaves, folded(params["blocks"], moments.mu["blocks"]).parts))
    close([np.concatenate(parts) for parts in got], jax.tree.leaves(want))
    other = step.split(step.init(parameters()), 2)[1].mu["blocks"]
    with pytest.raises(StackError, match=r"`moments` holds 2 \+ 2 layers, and `params` 1 \+ 3"):
        folded(step.split(step.init(parameters()), 1)[0]["blocks"], other)

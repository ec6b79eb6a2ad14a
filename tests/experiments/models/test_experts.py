"""A mixture of experts: its output, its gradient and its balance against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.command.load import load
from experiments.models.blocks import pure
from experiments.models.experts import Experts, imbalance, selected

E, K, D, F = 4, 2, 8, 32


@pytest.fixture(scope="module")
def mixture():
    """A mixture in float64, none of whose parameters is near zero, as (graph, parameters, x)."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        settings = f"width={D}", "heads=2", "dtype=float64", "balance=0.5"
        model = load("gpt_moe_nano", [f"model.{one}" for one in settings]).model
        make = lambda shape, scale: jnp.asarray(rng.normal(size=shape))
        experts = Experts(model, make, jax.nn.gelu, 1.0)
        return nnx.graphdef(experts), pure(experts), jnp.asarray(rng.normal(size=(3, 5, D)))


def applied(graph, parameters, x):
    return nnx.merge(graph, nnx.State(parameters))(x)


def plain(p, x_D):
    """One token: its experts one by one."""
    logits_E = x_D @ p["router"]
    best = np.argsort(-logits_E)[:K]
    weights = np.exp(logits_E[best]) / np.exp(logits_E[best]).sum()
    gelu = lambda u: np.asarray(jax.nn.gelu(jnp.asarray(u)))
    hidden = lambda e: gelu(x_D @ p["up"][e] + p["up_bias"][e])
    outputs = [hidden(e) @ p["down"][e] + p["down_bias"][e] for e in best]
    return sum(w * y for w, y in zip(weights, outputs))


def test_a_token_is_the_weighted_sum_of_its_likeliest_experts(mixture):
    with jax.enable_x64(True):
        graph, parameters, x_BSD = mixture
        got = np.asarray(applied(graph, parameters, x_BSD))
        p = jax.tree.map(np.asarray, parameters)
        wanted = [[plain(p, np.asarray(x_D)) for x_D in row] for row in x_BSD]
        np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_the_gradient_has_the_balance_of_the_loads(mixture):
    """The gradient is the output's, and the weighted one of the loss of Switch's equation 4."""
    with jax.enable_x64(True):
        graph, parameters, x_BSD = mixture
        weights = jnp.asarray(np.random.default_rng(1).normal(size=x_BSD.shape))

        def balanced(p, x):
            probs = jax.nn.softmax(x @ p["router"]).reshape(-1, E)
            best = jnp.argsort(-probs, axis=1)[:, :K]
            loads = jnp.stack([(best == e).sum() for e in range(E)]) / best.size
            return E * sum(loads[e] * probs[:, e].mean() for e in range(E))

        of_output = lambda p, x, graph: (applied(graph, p, x) * weights).sum()
        got = jax.jit(jax.grad(lambda p, x: of_output(p, x, graph), (0, 1)))(parameters, x_BSD)
        total = lambda p, x: reference(p, x, weights) + 0.5 * balanced(p, x)
        wanted = jax.jit(jax.grad(total, (0, 1)))(parameters, x_BSD)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert abs(b).max() > 1e-3
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
        alone = jax.grad(balanced)(parameters, x_BSD)["router"]
        assert abs(alone).max() > 1e-3, "the balance has a gradient"


def reference(p, x_BSD, weights_BSD):
    """The weighted sum of the outputs: all experts of each token, with the gates of the best."""
    x = x_BSD.reshape(-1, D)
    logits = x @ p["router"]
    least = jnp.sort(logits, axis=1)[:, -K][:, None]
    gates = jax.nn.softmax(jnp.where(logits >= least, logits, -jnp.inf))
    outputs = (
        jax.nn.gelu(x @ p["up"][e] + p["up_bias"][e]) @ p["down"][e] + p["down_bias"][e]
        for e in range(E)
    )
    y = sum(gates[:, [e]] * output for e, output in enumerate(outputs))
    return (y * weights_BSD.reshape(-1, D)).sum()


def test_equal_loads_are_balanced_and_one_expert_for_all_is_not():
    even = jnp.full((1, 8, E), 1 / E)
    turns = jnp.asarray(np.eye(E, dtype=bool)[np.arange(8) % E])[None]
    assert imbalance(even, turns) == pytest.approx(1.0)
    first = jnp.zeros((1, 8, E)).at[..., 0].set(1.0)
    assert imbalance(first, first == 1) == pytest.approx(E)


def test_as_many_experts_as_wanted_are_selected_where_all_are_equal():
    np.testing.assert_array_equal(
        selected(jnp.full((2, 3, E), 0.25), K).sum(-1), np.full((2, 3), K)
    )

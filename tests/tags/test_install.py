"""Policies in the configs of libraries: by name, and as a field that is copied."""

import copy
import dataclasses
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.errors import TagError
from jaxmem.plans import Action, Assignment, Choice
from tests.auto.steps import blocks_in

pytestmark = pytest.mark.core
PLAN = Assignment({"block": {"up": Choice(Action.KEEP)}})


@pytest.fixture(autouse=True)
def no_policy_stays():
    yield
    for name in ("jaxmem", "planned"):
        if hasattr(jax.checkpoint_policies, name):
            delattr(jax.checkpoint_policies, name)


def looked_up(name: str):
    """A model's layers as big_vision and simply make them: the policy by its name in a config."""

    def layer(x, w):
        return x + jnp.tanh(jaxmem.tag(x @ w, "up")) @ w.T, None

    policy = getattr(jax.checkpoint_policies, name, None)
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def loss(w, x, name="jaxmem"):
    return (jax.lax.scan(looked_up(name), x, w)[0] ** 2).mean()


def test_a_library_that_looks_policies_up_by_name_is_planned():
    w, x = jnp.full((6, 8, 8), 0.1), jnp.ones((16, 8))

    def build(plan):
        jaxmem.install(plan)
        return lambda w, x: jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))

    whole = jaxmem.plan(build, w, x, budget="1GiB")
    recomputed = jaxmem.plan(build, w, x, budget=whole.baseline_bytes - 1)
    assert recomputed.compiled_bytes < whole.baseline_bytes
    assert {row.tag for row in recomputed.rows} == {"up"}
    got, want = build(recomputed)(w, x), build(None)(w, x)
    assert float(jnp.abs(got - want).max()) < 1e-12
    assert float(jnp.abs(want - w).max()) > 0, "the gradient is not zero"


def test_a_name_holds_the_latest_plan():
    first = jaxmem.install(None, "planned")
    assert jax.checkpoint_policies.planned == first == jaxmem.remat_policy(None)
    second = jaxmem.install(PLAN, "planned")
    assert jax.checkpoint_policies.planned == second == jaxmem.remat_policy(PLAN)
    assert blocks_in(
        jax.grad(functools.partial(loss, name="planned")), jnp.ones((2, 4, 4)), jnp.ones(4)
    )


@pytest.mark.parametrize("name", ["dots_saveable", "not a name", "", 3, "everything_saveable"])
def test_names_that_are_refused(name):
    before = jax.checkpoint_policies.dots_saveable
    with pytest.raises(TagError, match="`name` is"):
        jaxmem.install(PLAN, name)
    assert jax.checkpoint_policies.dots_saveable is before


@dataclasses.dataclass(frozen=True)
class RematSpec:
    """A config of AXLearn's kind, which is made plain before its fields are used."""

    prevent_cse: bool = False
    policy: Any = None


@pytest.mark.parametrize(
    "copied",
    [
        lambda policy: dataclasses.asdict(RematSpec(policy=policy))["policy"],
        copy.deepcopy,
        lambda policy: pickle.loads(pickle.dumps(policy)),
    ],
)
@pytest.mark.parametrize("plan", [PLAN, None])
def test_a_policy_survives_a_copy_of_its_config(copied, plan):
    policy = jaxmem.remat_policy(plan)
    again = copied(policy)
    assert callable(again)
    assert again == policy
    assert hash(again) == hash(policy)
    assert again != jaxmem.remat_policy(Assignment.nothing())

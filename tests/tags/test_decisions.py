"""What an object given as `plan` means, the same to a policy and to a stack. Policies in the
configs of libraries: by name, and as a field that is copied.
"""

import copy
import dataclasses
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._core.actions import KEEP, RECOMPUTE, UNTAGGED, Action, Choice
from jaxmem._model.tags.policy import groups_of
from jaxmem.errors import TagError
from jaxmem.plans import Assignment
from tests.auto.steps import blocks_in
from tests.shared.refused import refused

INT4 = Choice(Action.COMPRESS, "grouped_symmetric(group=64,scale=bfloat16)")
GROUPED = {"block[0:1]": {"up": KEEP}, "block[1:3]": {"up": INT4}}


class Own:
    """A user's own object, of the two methods."""

    def choices_for(self, block):
        return {"block": {}, **GROUPED}[block]

    def groups(self, block):
        return ((0, 1), (1, 3)) if block == "block" else ()


@pytest.mark.parametrize("plan", [Assignment(GROUPED), Own()], ids=["assignment", "own"])
def test_groups_of_an_object_are_not_lost(plan):
    found = groups_of(plan, "block", 3)
    assert [(g.start, g.stop, dict(p.choices)) for g, p in found.items()] == [
        (0, 1, {"up": KEEP}),
        (1, 3, {"up": INT4}),
    ]
    assert all(policy.layers == 3 for policy in found.values())


def test_everything_kept_is_one_policy_however_it_is_said():
    said = [None, Assignment.everything(), Assignment({"block": {UNTAGGED: KEEP}})]
    said.append(Assignment({"block": {"up": "keep", UNTAGGED: "keep"}}))
    assert len({jaxmem.remat_policy(plan) for plan in said}) == 1
    assert len({tuple(groups_of(plan, "block", 2).items()) for plan in said}) == 1


def refused_by_both(plan, message):
    for read in (jaxmem.remat_policy, lambda plan: groups_of(plan, "block", 3)):
        with pytest.raises(TagError, match=message):
            read(plan)


def test_a_block_that_nobody_named_is_an_error_for_a_policy_and_for_a_stack():
    plan = Assignment({"encoder": {"up": KEEP}, "decoder[0:2]": {}, "decoder[2:3]": {}})
    message = "the assignment knows no block 'block'; it was made for 'encoder', 'decoder'"
    refused_by_both(plan, message)
    assert jaxmem.remat_policy(Assignment.nothing(), block="any").choices == ()


def test_a_policy_cannot_be_of_groups():
    with pytest.raises(TagError, match=r"groups of the layers of block 'block' apart.*stack"):
        jaxmem.remat_policy(Assignment(GROUPED))


@pytest.mark.parametrize(
    "plan", [{"block": {}}, "plan.json", Assignment, object(), {"up": KEEP}, 3, lambda block: {}]
)
def test_what_decides_nothing_is_refused_by_both(plan):
    refused_by_both(plan, "`plan` is .*; expected a jaxmem.Plan")


def test_choices_may_be_names_of_actions():
    plan = Assignment({"block": {"up": "keep", "down": "recompute", "probs": INT4}})
    expected = {"up": KEEP, "down": RECOMPUTE, "probs": INT4}
    assert plan.choices_for("block") == expected
    assert plan.groups("block") == ()


@refused(
    TagError,
    ({"block": {"up": "compress"}}, r"got 'compress' for tag 'up' of block 'block' \(.*codec"),
    ({"block": {"up": "kept"}}, "got 'kept' for tag 'up'"),
    ({"block": {"up": None}}, "got None for tag 'up'"),
    ({"block": {3: "up"}}, "got 'up' for tag 3"),
    ({"block": "keep"}, "got 'keep' for block 'block'"),
    ({1: {}}, "for block 1"),
    ([("block", {})], "`actions` is "),
)
def test_what_assigns_nothing_is_told(actions):
    Assignment(actions)


def test_a_layer_of_a_python_loop_has_the_policy_of_its_group():
    plan = Assignment({"block[0:1]": {"up": "keep"}, "block[1:3]": {}})
    policies = [jaxmem.remat_policy(plan, layer=(i, 3)) for i in range(3)]
    assert [p.block for p in policies] == ["block[0:1]", "block[1:3]", "block[1:3]"]
    assert all(p.layers == 3 for p in policies)
    alike = jaxmem.remat_policy(Assignment({"block": {}}), layer=(2, 3))
    assert (alike.block, alike.layers) == ("block", 3)
    with pytest.raises(TagError, match="there are 4 layers"):
        jaxmem.remat_policy(plan, layer=(0, 4))
    for wrong in (1, (3, 3), (-1, 3), (0,), (True, 3), [0, 3], (0.0, 3)):
        with pytest.raises(TagError, match="`layer` is .*; expected .i, L."):
            jaxmem.remat_policy(plan, layer=wrong)


def test_everything_kept_saves_no_wider_copy_of_what_it_saves():
    """Softmax's derivative computes in float32 from a result in bfloat16."""
    softmax = lambda x: jaxmem.ops.softmax(x * 2, name="p")
    block = jax.checkpoint(softmax, policy=jaxmem.remat_policy(None))
    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    saved = jax.eval_shape(lambda x: jax.vjp(block, x)[1], x)
    shapes = [(a.shape, a.dtype.name) for a in jax.tree.leaves(saved) if a.shape == x.shape]
    assert shapes == [(x.shape, "bfloat16")]


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
        jaxmem.plans.install(plan)
        return lambda w, x: jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))

    whole = jaxmem.plan(build, w, x, budget="1GiB")
    recomputed = jaxmem.plan(build, w, x, budget=whole.baseline_bytes - 1)
    assert recomputed.compiled_bytes < whole.baseline_bytes
    assert {row.tag for row in recomputed.rows} == {"up"}
    got, want = build(recomputed)(w, x), build(None)(w, x)
    assert float(jnp.abs(got - want).max()) < 1e-12
    assert float(jnp.abs(want - w).max()) > 0, "the gradient is not zero"


def test_a_name_holds_the_latest_plan():
    first = jaxmem.plans.install(None, "planned")
    assert jax.checkpoint_policies.planned == first == jaxmem.remat_policy(None)
    second = jaxmem.plans.install(PLAN, "planned")
    assert jax.checkpoint_policies.planned == second == jaxmem.remat_policy(PLAN)
    assert blocks_in(
        jax.grad(functools.partial(loss, name="planned")), jnp.ones((2, 4, 4)), jnp.ones(4)
    )


@pytest.mark.parametrize("name", ["dots_saveable", "not a name", "", 3, "everything_saveable"])
def test_names_that_are_refused(name):
    before = jax.checkpoint_policies.dots_saveable
    with pytest.raises(TagError, match="`name` is"):
        jaxmem.plans.install(PLAN, name)
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

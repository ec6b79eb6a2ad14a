"""What an object given as `plan` means: the same to a policy and to a stack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.actions import KEEP, RECOMPUTE, REST, Action, Choice
from jaxmem._model.tags.policy import groups_of
from jaxmem.errors import TagError
from jaxmem.plans import Assignment

pytestmark = pytest.mark.core
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
    said = [None, Assignment.everything(), Assignment({"block": {REST: KEEP}})]
    said.append(Assignment({"block": {"up": "keep", REST: "keep"}}))
    assert len({jaxmem.remat_policy(plan) for plan in said}) == 1
    assert len({tuple(groups_of(plan, "block", 2).items()) for plan in said}) == 1


def test_a_block_that_nobody_named_is_an_error_for_a_policy_and_for_a_stack():
    plan = Assignment({"encoder": {"up": KEEP}, "decoder[0:2]": {}, "decoder[2:3]": {}})
    message = "the assignment knows no block 'block'; it was made for 'encoder', 'decoder'"
    with pytest.raises(TagError, match=message):
        jaxmem.remat_policy(plan)
    with pytest.raises(TagError, match=message):
        groups_of(plan, "block", 3)
    assert jaxmem.remat_policy(Assignment.nothing(), block="any").choices == ()


def test_a_policy_cannot_be_of_groups():
    with pytest.raises(TagError, match=r"groups of the layers of block 'block' apart.*stack"):
        jaxmem.remat_policy(Assignment(GROUPED))


@pytest.mark.parametrize(
    "plan", [{"block": {}}, "plan.json", Assignment, object(), {"up": KEEP}, 3, lambda block: {}]
)
def test_what_decides_nothing_is_refused_by_both(plan):
    message = "`plan` is .*; expected a jaxmem.Plan"
    with pytest.raises(TagError, match=message):
        jaxmem.remat_policy(plan)
    with pytest.raises(TagError, match=message):
        groups_of(plan, "block", 3)


def test_choices_may_be_names_of_actions():
    plan = Assignment({"block": {"up": "keep", "down": "recompute", "probs": INT4}})
    expected = {"up": KEEP, "down": RECOMPUTE, "probs": INT4}
    assert plan.choices_for("block") == expected
    assert plan.groups("block") == ()


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ({"block": {"up": "compress"}}, r"got 'compress' for tag 'up' of block 'block' \(.*codec"),
        ({"block": {"up": "kept"}}, "got 'kept' for tag 'up'"),
        ({"block": {"up": None}}, "got None for tag 'up'"),
        ({"block": {3: "up"}}, "got 'up' for tag 3"),
        ({"block": "keep"}, "got 'keep' for block 'block'"),
        ({1: {}}, "for block 1"),
        ([("block", {})], "`actions` is "),
    ],
)
def test_what_assigns_nothing_is_told(actions, message):
    with pytest.raises(TagError, match=message):
        Assignment(actions)


def test_a_stack_under_an_assignment_by_hand_has_the_plain_gradient():
    keys = jax.random.split(jax.random.key(0), 2)
    w = jax.random.normal(keys[0], (3, 8, 8)) / 3
    x = jax.random.normal(keys[1], (4, 8))

    def layer(w, x):
        return x + jnp.sin(jaxmem.tag(x @ w, "up"))

    def loss(w, plan):
        return (jaxmem.stack(layer, w, x, plan=plan) ** 2).sum()

    plain = jax.grad(loss)(w, None)
    assert float(abs(plain).min()) > 0
    plan = Assignment({"block[0:1]": {"up": "keep"}, "block[1:3]": {}})
    np.testing.assert_allclose(jax.grad(loss)(w, plan), plain, rtol=1e-12)


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

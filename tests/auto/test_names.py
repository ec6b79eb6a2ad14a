"""Names of tags in models that name their values by `checkpoint_name`: one tag for each tensor."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem._core.actions import KEEP, OFFLOAD
from jaxmem._trace.jaxpr import equations
from jaxmem.plans import Assignment
from tests.auto.steps import layers_of, scanned, unrolled
from tests.shared.compare import close
from tests.shared.foreign import maxtext
from tests.shared.foreign.size import normal

WIDTH, LAYERS = 16, 3


def tags(loss, *args) -> dict[str, str]:
    """Kinds by the names of tags, of the last layer."""
    return {c.name: c.kind for c in layers_of(loss, *args)[-1].candidates}


def programs(loss, plan, *args):
    return jax.make_jaxpr(jax.grad(jaxmem.auto(loss, plan)))(*args).jaxpr


def products(loss, plan, *args) -> int:
    """Matrix products of the gradient's program; those in a loop over layers count once. A
    `dot_general` that sums nothing is none.
    """
    found = (e for e in equations(programs(loss, plan, *args)) if e.primitive.name == "dot_general")
    return sum(bool(e.params["dimension_numbers"][0][0]) for e in found)


def names(loss, plan, *args) -> list[str]:
    """What `checkpoint_name` names in the gradient's program."""
    found = equations(programs(loss, plan, *args))
    return [e.params["name"] for e in found if e.primitive.name == "name"]


def test_a_decoder_in_maxtexts_shape_has_one_tag_for_each_tensor():
    loss, params, args = maxtext.decoder()
    assert tags(loss, params, *args) == {
        "norm": "norm",
        "scores": "linear",
        "softmax": "softmax",
        "linear": "linear",  # the attention's result before it is divided by the sums
        "residual": "residual",
        "norm_2": "norm",
        "gelu": "gelu",
    }
    assert set(names(loss, Assignment.nothing(), params, *args)) == set(maxtext.NAMES)


def test_its_own_names_spare_what_made_them():
    """Kept with scores and softmax, nothing is left of the forward's products."""
    loss, params, args = maxtext.decoder()
    kept = dict.fromkeys(("scores", "softmax", "linear", *maxtext.NAMES), KEEP)
    every = products(loss, Assignment.everything(), params, *args)
    assert products(loss, Assignment({"auto": kept}), params, *args) == every
    without = {name: KEEP for name in kept if name != "mlpwi_1"}
    assert products(loss, Assignment({"auto": without}), params, *args) == every + 1


def attention_layer(x, p, name=lambda a: checkpoint_name(a, "probs")):
    scores = (x @ p["q"]) @ (x @ p["k"]).T
    return x + name(jax.nn.softmax(scores)) @ (x @ p["v"])


def curved_layer(x, p, name=lambda a: checkpoint_name(a.reshape(-1, 2 * WIDTH), "curved")):
    return x + (name(jnp.tanh(x @ p["q"])).reshape(x.shape) @ p["k"]) @ p["v"]


PARAMS = {n: normal(i, LAYERS, WIDTH, WIDTH) for i, n in enumerate("qkv")}
X = normal(9, 8, WIDTH)

NAMED = {
    "probs": (attention_layer, "softmax"),
    "curved": (curved_layer, "gelu"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_name_of_what_its_own_derivative_reads_is_moved_into_the_derivative(name):
    """Elsewhere the derivative would read the value from before the name, and make it again."""
    layer, kind = NAMED[name]
    loss = functools.partial(scanned, layer=layer)
    found = tags(loss, PARAMS, X)
    assert found[name] == kind
    assert list(found.values()).count(kind) == 1
    program = programs(loss, Assignment({"auto": {name: KEEP}}), PARAMS, X)
    assert f"'{name}'" not in re.findall(r"jaxmem_tag\[[^]]*\]", str(program)), "no codec unasked"
    rest = {n: KEEP for n in found if n != name}
    kept, made = (Assignment({"auto": rest | more}) for more in ({name: KEEP}, {}))
    assert products(loss, made, PARAMS, X) == products(loss, kept, PARAMS, X) + 1
    assert products(loss, kept, PARAMS, X) == products(loss, Assignment.everything(), PARAMS, X)


@pytest.mark.quick("None-curved_layer", "action1-attention_layer", "action2-curved_layer")
@pytest.mark.parametrize("layer", [attention_layer, curved_layer])
@pytest.mark.parametrize("action", [None, KEEP, OFFLOAD])
def test_gradients_are_the_models_own(layer, action):
    loss = functools.partial(scanned, layer=layer)
    name = next(n for n, (one, _) in NAMED.items() if one is layer)
    plan = Assignment({"auto": {name: action} if action else {}})
    want = jax.jit(jax.grad(loss))(PARAMS, X)
    got = jax.jit(jax.grad(jaxmem.auto(loss, plan)))(PARAMS, X)
    close(got, want)
    assert min(np.abs(b).max() for b in jax.tree.leaves(want)) > 0


def test_one_name_of_two_tensors_is_one_decision():
    def layer(x, p):
        return attention_layer(attention_layer(x, p), p)

    loss = functools.partial(scanned, layer=layer)
    (one,) = layers_of(loss, PARAMS, X)
    assert [c.name for c in one.candidates if c.kind == "softmax"] == ["probs"] * 2
    rest = dict.fromkeys((c.name for c in one.candidates if c.name != "probs"), KEEP)
    kept, made = (Assignment({"auto": rest | more}) for more in ({"probs": KEEP}, {}))
    assert products(loss, made, PARAMS, X) == products(loss, kept, PARAMS, X) + 2


def test_layers_of_a_loop_may_name_one_tensor_otherwise():
    own = lambda i: functools.partial(attention_layer, name=lambda a: checkpoint_name(a, f"p{i}"))
    loss = functools.partial(unrolled, layers=[own(i) for i in range(LAYERS)])
    found = layers_of(loss, PARAMS, X)
    named = [[c.name for c in layer.candidates if c.kind == "softmax"] for layer in found]
    assert named == [[f"p{i}"] for i in range(LAYERS)]


def test_the_layers_input_has_the_name_of_a_view_of_it():
    def layer(x, p):
        normed = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        again = checkpoint_name(x.reshape(4, -1), "tokens").reshape(x.shape)
        return x + jnp.tanh(normed @ p["q"]) @ p["k"] + (again @ p["v"])

    loss = functools.partial(scanned, layer=layer)
    found = tags(loss, PARAMS, X)
    assert found["tokens"] == "residual"
    assert "in" not in found
    assert names(loss, Assignment.nothing(), PARAMS, X).count("tokens") >= 1


def test_a_name_that_is_all_there_is_to_save_leaves_no_second_tag():
    def layer(x, p):
        named = checkpoint_name((x @ p["q"] + 1.0).reshape(4, -1), "up")
        return x + (jnp.sin(named.reshape(x.shape)) @ p["k"]) @ p["v"]

    found = tags(functools.partial(scanned, layer=layer), PARAMS, X)
    assert "residual" in found.values()
    assert found == {"in": "residual", "linear": "linear", "linear_2": "linear"}


def test_scores_are_called_so_where_a_softmax_reads_them():
    """They are bounded, so that the derivative reads them beside the softmax."""
    bounded = lambda q, k: 5 * jnp.tanh(jnp.einsum("shd,thd->hst", q, k) / 5)

    def layer(x, p, scores=bounded):
        with jax.named_scope("projected"):
            q, k, v = ((x @ p[n]).reshape(8, 4, 4) for n in "qkv")
        return x + jnp.einsum("hst,thd->shd", jax.nn.softmax(scores(q, k)), v).reshape(x.shape)

    named = functools.partial(layer, scores=jax.named_scope("attention")(bounded))
    assert "scores" in tags(functools.partial(scanned, layer=layer), PARAMS, X)
    assert "attention.scores" in tags(functools.partial(scanned, layer=named), PARAMS, X)

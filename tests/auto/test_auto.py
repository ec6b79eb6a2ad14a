"""`jaxmem.auto`: models that name no tag train as they did, under every assignment, and their plans
change the program. In models that name their values by `checkpoint_name`, each tensor has one tag.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem._core.actions import KEEP, OFFLOAD
from jaxmem._model.auto.calls import traced
from jaxmem._model.auto.find import Finder, read
from jaxmem._trace.jaxpr import equations
from jaxmem.errors import StepError, TagError
from jaxmem.plans import Assignment
from tests.auto.steps import blocks_in, layers_of, scanned, unrolled
from tests.shared.compare import close, relative
from tests.shared.foreign import flax_models, maxtext
from tests.shared.foreign import plain as models
from tests.shared.foreign.size import SMALL, normal, tokens

EVERYTHING, NOTHING = Assignment.everything(), Assignment.nothing()
MODELS = {
    "gemma, a Python loop": models.gemma_in_a_loop,
    "gemma, a scan": models.gemma_in_a_scan,
    "gemma, a scan of checkpoints": models.gemma_in_a_scan_of_checkpoints,
    "microbatches, a chunked loss": models.microbatches_with_a_chunked_loss,
    "mixture of experts": models.mixture_of_experts,
    "names twice in a layer": models.names_twice_in_a_layer,
    "MaxText's names and softmax": maxtext.decoder,
    "encoder and decoder": models.encoder_and_decoder,
    "recurrent over time": models.recurrent_over_time,
    "cond": models.under_cond,
    "vmap": models.under_vmap,
    "shard_map": models.under_shard_map,
    "jit with shardings": models.sharded_jit,
    "linen, nn.scan, dropout": functools.partial(flax_models.linen_transformer, scanned=True),
    "linen, a Python loop, dropout": functools.partial(
        flax_models.linen_transformer, scanned=False
    ),
    "linen, batch statistics": flax_models.resnet_with_batch_statistics,
}


def gradients(loss, params, args):
    """Value and gradients; of a loss that returns more, that too."""
    shape = jax.eval_shape(lambda p: arrays(loss(p, *args)), params)
    return jax.jit(
        jax.value_and_grad(lambda p: arrays(loss(p, *args)), has_aux=isinstance(shape, tuple))
    )(params)


def arrays(result):
    """Without what is no array, which jit does not return."""
    if not isinstance(result, tuple):
        return result
    value, more = result
    return value, [x for x in jax.tree.leaves(more) if not isinstance(x, str)]


def farthest(got, want) -> float:
    """The largest difference of two trees, relative to each leaf's largest value, none of which is
    zero.
    """
    largest = [float(np.abs(b).max()) for b in jax.tree.leaves(want)]
    assert min(largest) > 0, "a gradient is zero: nothing is compared"
    return relative(got, want)


@pytest.mark.quick("MaxText's names and softmax", "recurrent over time")
@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_are_the_models_own(name):
    """Under every assignment, and the two extreme ones are different programs."""
    loss, params, args = MODELS[name]()
    value, want = gradients(loss, params, args)
    for plan in (EVERYTHING, NOTHING):
        got_value, got = gradients(jaxmem.auto(loss, plan), params, args)
        got_loss, own_loss = (np.asarray(jax.tree.leaves(v)[0]) for v in (got_value, value))
        np.testing.assert_array_max_ulp(got_loss, own_loss, 4)
        assert farthest(got, want) < 1e-12

    def program(plan) -> str:
        own = lambda p: jax.tree.leaves(jaxmem.auto(loss, plan)(p, *args))[0]
        return str(jax.make_jaxpr(jax.grad(own))(params))

    assert program(NOTHING) != program(EVERYTHING)


def test_an_nnx_model_is_changed_as_by_its_own_call():
    x = normal(0, 16, SMALL.width, scale=1.0).astype(jnp.float32)
    loss = lambda model, x: (model(x) ** 2).mean()
    results = []
    for plan in (None, NOTHING):
        model = flax_models.NNXModel(nnx.Rngs(0))
        value, grads = nnx.jit(nnx.value_and_grad(jaxmem.auto(loss, plan)))(model, x)
        results.append((value, grads, nnx.state(model)))
    is_key = lambda a: jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    plain, other = ([a for a in jax.tree.leaves(r) if not is_key(a)] for r in results)
    for a, b in zip(other, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    counts = [a for a in jax.tree.leaves(results[1][2]) if a.dtype == jnp.uint32 and not a.shape]
    assert max(map(int, counts)) > 0, "random keys were counted on"


def test_layers_have_names_of_their_modules_and_kinds():
    model, batch, found = flax_models.LinenModel(SMALL, scanned=True), tokens(SMALL), []

    def loss(key):
        variables = model.init({"params": key, "dropout": key}, batch)
        apply = lambda v: model.apply(v, batch, rngs={"dropout": key}).mean()
        found.extend(layers_of(apply, variables))

    jax.eval_shape(loss, jax.random.key(0))
    (layer,) = found
    kinds = {c.name: c.kind for c in layer.candidates}
    assert kinds["in"] == "residual"
    assert kinds["up"] == "linear"
    assert kinds["attention.query"] == kinds["attention.value"] == "qkv"
    assert {"softmax", "mask", "norm", "gelu"} <= set(kinds.values())


def test_equal_layers_of_a_loop_share_their_names():
    loss, params, args = models.gemma_in_a_loop()
    layers = layers_of(loss, params, *args)
    assert len(layers) >= SMALL.layers - 1
    (names,) = {tuple((c.name, c.kind) for c in layer.candidates) for layer in layers}
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("divisor", ["other rows", "the first row"])
def test_what_only_looks_like_a_softmax_keeps_its_derivative(divisor):
    """Exponentials that are divided by sums of other rows than their own."""

    def layer(x, p):
        powers = jnp.exp(jnp.tanh(x @ p["a"]))
        total = powers.sum(1)
        shares = powers / (total if divisor == "other rows" else total[:1])
        return x + shares @ p["b"]

    loss = functools.partial(scanned, layer=layer)
    params = {"a": normal(0, 3, 8, 8), "b": normal(1, 3, 8, 8)}
    x = normal(2, 8, 8, scale=1.0)
    want, got = (jax.jit(jax.grad(f))(params, x) for f in (loss, jaxmem.auto(loss, NOTHING)))
    assert farthest(got, want) < 1e-12
    own = functools.partial(scanned, layer=lambda x, p: x + jax.nn.softmax(x @ p["a"], 0) @ p["b"])
    (found,) = layers_of(own, params, x)
    assert "softmax" in [c.kind for c in found.candidates], "a softmax is still one"


@pytest.mark.parametrize(
    "plan", [NOTHING, EVERYTHING, Assignment({"auto[0:1]": {}, "auto[1:3]": {"*": "keep"}})]
)
def test_complex_layers_train_as_they_did(plan):
    def layer(x, p):
        mixed = jnp.fft.ifft(jnp.fft.fft(x, axis=0) * p["filter"], axis=0).real
        return x + jnp.tanh(mixed @ p["up"]) @ p["down"]

    loss = functools.partial(scanned, layer=layer)
    turn = jax.lax.complex(normal(0, 3, 8, 4, scale=1.0), normal(1, 3, 8, 4, scale=1.0))
    params = {"filter": turn, "up": normal(2, 3, 4, 8), "down": normal(3, 3, 8, 4)}
    x = normal(4, 8, 4, scale=1.0)
    want, got = (jax.jit(jax.grad(f))(params, x) for f in (loss, jaxmem.auto(loss, plan)))
    assert farthest(got, want) < 1e-12


def test_without_a_plan_the_function_is_the_users_own():
    loss, *_ = models.gemma_in_a_scan()
    assert jaxmem.auto(loss, None) is loss


def test_blocks_and_tags_of_the_users_own_stay():
    params = models.layer_parameters(stack=(SMALL.layers,))
    x = normal(1, SMALL.batch, SMALL.sequence, SMALL.width)

    def tagged(x, p):
        return models.gemma_layer(jaxmem.tag(x, "mine", kind="residual"), p), None

    loss = lambda params, x: (jax.lax.scan(tagged, x, params)[0] ** 2).mean()
    (layer,) = layers_of(loss, params, x)
    assert "in" not in [c.name for c in layer.candidates], "the user's tag is at the input"
    keep = Assignment({"auto": {"mine": "keep"}})
    program = str(jax.make_jaxpr(jax.grad(jaxmem.auto(loss, keep)))(params, x))
    assert "name=mine" in program
    block = jax.checkpoint(tagged, policy=jaxmem.remat_policy(NOTHING))
    blocks = lambda params, x: (jax.lax.scan(block, x, params)[0] ** 2).mean()
    with pytest.raises(StepError, match="its blocks are planned already"):
        jax.grad(jaxmem.auto(blocks, NOTHING))(params, x)


def test_where_there_is_no_layer_the_error_says_what_was_looked_at():
    def loss(w, x):
        total, _ = jax.lax.scan(lambda s, row: (s + row.sum(), None), 0.0, x)
        return total * (x @ w).mean()

    with pytest.raises(StepError, match=r"'loss'.*scan at .*test_auto.py.*no matrix product"):
        jax.grad(jaxmem.auto(loss, NOTHING))(normal(0, 4), normal(1, 3, 4))
    with pytest.raises(StepError, match="expected the loss or the step, a function"):
        jaxmem.auto(3, NOTHING)
    with pytest.raises(TagError, match="`plan` is int"):
        jaxmem.auto(loss, 3)


@pytest.mark.parametrize("scanned", [True, False])
def test_layers_that_write_a_reference_are_none(scanned):
    def layer(x, w, total):
        x = x + jnp.tanh(jnp.sin(x @ w))
        total[...] += jax.lax.stop_gradient(x.sum())
        return x

    def loss(params, x, written=True):
        total = jax.new_ref(jnp.zeros(()))
        if written and scanned:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w, total), None), x, params)
        elif written:
            for i in range(3):
                x = layer(x, params[i], total)
        else:
            x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params)
            total[...] = jax.lax.stop_gradient(x.sum())
        return (x**2).mean(), total[...]

    params, x = normal(0, 3, 4, 4), normal(1, 2, 4)
    gradients = lambda f, written: jax.jit(jax.grad(f, has_aux=True), static_argnums=2)(
        params, x, written
    )
    if scanned:
        with pytest.raises(StepError, match="jax.Ref, which no block"):
            jax.grad(jaxmem.auto(loss, NOTHING), has_aux=True)(params, x)
    else:  # what is between the writes of a Python loop is cut into pieces
        assert farthest(gradients(jaxmem.auto(loss, NOTHING), True), gradients(loss, True)) < 1e-12
        assert blocks_in(jax.grad(jaxmem.auto(loss, NOTHING), has_aux=True), params, x) > 0
    assert farthest(gradients(jaxmem.auto(loss, NOTHING), False), gradients(loss, False)) < 1e-12


def test_what_is_traced_again_has_the_same_labels():
    """Inside a shard_map or a conditional, which JAX may trace more than once."""
    for model in (models.under_shard_map, models.under_cond):
        loss, params, args = model()
        finder, (closed, call) = Finder(NOTHING), traced(loss, (params, *args), {})
        program = finder.with_blocks(read(closed))
        seen = []
        for _ in range(2):
            jax.eval_shape(functools.partial(call, program.run))
            seen.append({layer.label for layer in finder.found})
        assert seen[0] == seen[1]
        assert "auto" in seen[0]


def test_a_plan_that_does_not_name_a_layer_is_an_error():
    loss, params, args = models.gemma_in_a_scan()
    with pytest.raises(TagError, match="knows no block 'auto'"):
        jax.grad(jaxmem.auto(loss, Assignment({"block": {}})))(params, *args)


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
        q, k, v = (x @ p[name] for name in "qkv")
        probs = (jax.nn.softmax(a @ b.T) for a, b in ((q, k), (k, q)))
        return x + sum(checkpoint_name(a, "probs") @ v for a in probs)

    loss = functools.partial(scanned, layer=layer)
    (one,) = layers_of(loss, PARAMS, X)
    assert [c.name for c in one.candidates if c.kind == "softmax"] == ["probs"] * 2
    rest = dict.fromkeys((c.name for c in one.candidates if c.name != "probs"), KEEP)
    kept, made = (Assignment({"auto": rest | more}) for more in ({"probs": KEEP}, {}))
    assert products(loss, made, PARAMS, X) == products(loss, kept, PARAMS, X) + 2


def masked(scores):
    return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e9))


def masked_by_a_rule(scores):
    """`masked` with a derivative rule."""
    rule = jax.custom_vjp(masked)
    rule.defvjp(
        lambda s: (masked(s),) * 2, lambda y, g: (y * (g - (g * y).sum(-1, keepdims=True)),)
    )
    return rule(scores)


@pytest.mark.parametrize("attention", [masked, masked_by_a_rule])
def test_a_mask_on_an_explicit_mesh_has_the_sharding_of_the_scores(attention):
    """The batch is sharded, and the layers' types say so."""

    def layer(x, p):
        scores = jnp.einsum("bsd,btd->bst", x @ p["q"], x @ p["k"])
        return x + attention(scores) @ (x @ p["v"])

    loss = functools.partial(scanned, layer=layer)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(9, 4, 8, WIDTH), jax.NamedSharding(mesh, P("data")))
        params = jax.device_put(PARAMS, jax.NamedSharding(mesh, P()))
        want = jax.jit(jax.grad(loss))(params, x)
        got = jax.jit(jax.grad(jaxmem.auto(loss, Assignment.nothing())))(params, x)
    close(got, want)
    assert min(np.abs(b).max() for b in jax.tree.leaves(want)) > 0


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

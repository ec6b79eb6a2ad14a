"""The tag under every transformation: exact where the action is lossless, within the codec where it
is not. Values that `checkpoint_name` names: a policy of ours may compress them, and every other
policy does what it did.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import partial_eval

import jaxmem
from jaxmem._core.actions import KEEP, OFFLOAD, RECOMPUTE, Choice
from jaxmem._core.assignment import Assignment
from jaxmem._model.tags.primitive import let_names_be_encoded, name_p
from jaxmem.errors import TagError
from tests.shared import children, models
from tests.shared.compare import close, cosine, farthest
from tests.shared.marks import slow
from tests.shared.refused import refused

LOSSLESS = ("keep", "recompute", "offload")
LOSSY = ("compress", "compress_offload")
each_action = pytest.mark.parametrize(
    "action", ["recompute", "compress_offload", *map(slow, ("keep", "offload", "compress"))]
)


def policy(action):
    return None if action is None else jaxmem.remat_policy(models.draft(action))


@functools.cache
def gradients(form, action):
    """Loss and gradients under an action, or without a checkpoint: compiled once for all tests."""
    p, x = models.parameters(dtype=jnp.float64), models.batch(dtype=jnp.float64)
    return jax.jit(jax.value_and_grad(form(policy(action))))(p, x)


@pytest.mark.quick("keep-scanned", "recompute-unrolled", "offload-scanned")
@pytest.mark.parametrize("form", [models.scanned, models.unrolled])
@pytest.mark.parametrize("action", LOSSLESS)
def test_lossless_gradient_is_the_plain_one(form, action):
    close(gradients(form, action), gradients(form, None), 1e-12)


@pytest.mark.quick("compress_offload")
@pytest.mark.parametrize("action", LOSSY)
def test_lossy_forward_is_exact_and_gradient_near(action):
    got, want = gradients(models.scanned, action), gradients(models.scanned, None)
    close(got[0], want[0], 1e-14)
    assert 0.9 < cosine(got[1], want[1]) < 1 - 1e-9, (
        "near the plain gradient, and not it: the codes are what the backward reads"
    )


def residual_bytes(policy):
    """Bytes that the backward of one checkpointed block keeps, less its parameters."""
    p = jax.tree.map(lambda a: a[0], models.parameters())
    layer = jax.checkpoint(models.block, policy=policy, prevent_cse=False)
    of = lambda x, p, k: jax.vjp(lambda x, p: layer(x, p, k), x, p)[1]
    saved = jax.eval_shape(of, models.batch(), p, jnp.float32(0))
    leaves = [a for a in jax.tree.leaves(saved) if a.shape not in {q.shape for q in p.values()}]
    return sum(a.size * a.dtype.itemsize for a in leaves)


@pytest.mark.parametrize("action", LOSSLESS)
def test_complex_values_are_stored(action):
    """JAX itself cannot save one of a checkpointed block."""
    w = jax.random.normal(jax.random.key(0), (2, 4, 4), jnp.complex128)

    def gradients(wrap):
        block = wrap(lambda w: jnp.tanh(jaxmem.tag(jnp.exp(w[0] @ w[1]), "powers")) @ w[1])
        return jax.jit(jax.grad(lambda w: (jnp.abs(block(w)) ** 2).sum()))(w)

    stored = jaxmem.remat_policy(Assignment({"block": {"powers": action}}))
    wrap = functools.partial(jax.checkpoint, policy=stored)
    close(gradients(wrap), gradients(lambda f: f), 1e-12)
    assert np.abs(gradients(wrap)).min() > 0


def test_each_action_saves_its_own_bytes():
    x = models.batch()
    full = {a: residual_bytes(policy(a)) for a in ("keep", "compress", "recompute")}
    assert full["recompute"] <= x.nbytes + 16  # the block's input, and its number
    assert 0 < full["compress"] < 0.3 * full["keep"]
    assert residual_bytes(jaxmem.remat_policy(None)) > full["keep"]


def test_offloaded_residuals_lie_in_host_memory():
    p = jax.tree.map(lambda a: a[0], models.parameters())
    for action, dtype in (("offload", "f32"), ("compress_offload", "u8")):
        policy = jaxmem.remat_policy(models.draft(action))
        layer = jax.checkpoint(models.block, policy=policy, prevent_cse=False)
        grad = jax.grad(lambda x, p, k, layer=layer: layer(x, p, k).sum())
        text = str(jax.make_jaxpr(grad)(models.batch(), p, jnp.float32(0)))
        assert f"{dtype}<host>" in text


def test_outside_a_checkpoint_a_tag_is_free():
    p, x = models.parameters(), models.batch()
    compiled = lambda f: jax.jit(jax.grad(f)).lower(p, x).compile()

    def untagged(x, p, key):
        n = models.norm(x)
        up = models.norm(x @ p["a"] + n) @ p["up"]
        return x + jax.nn.gelu(up) @ p["down"]

    def tagged(x, p, key):
        x = jaxmem.tag(x, "in")
        n = jaxmem.tag(models.norm(x), "ln", kind="norm")
        up = jaxmem.tag(models.norm(x @ p["a"] + n) @ p["up"], "up")
        return x + jaxmem.tag(jax.nn.gelu(up), "gelu") @ p["down"]

    a, b = compiled(models.scanned(None, untagged)), compiled(models.scanned(None, tagged))
    operations = lambda c: sorted(re.findall(r"= \S+ ([a-z][a-z0-9-]*)\(", c.as_text()))
    assert operations(a) == operations(b)
    assert len(operations(a)) > 100
    assert a.memory_analysis().temp_size_in_bytes == b.memory_analysis().temp_size_in_bytes


def of_one(action):
    """Gradients of one example."""
    p, loss = models.parameters(dtype=jnp.float64), models.scanned(policy(action))
    return lambda x: jax.grad(loss)(p, x[None])


@functools.cache
def one_by_one(action):
    x = models.batch(4, dtype=jnp.float64)
    return jax.tree.map(lambda *g: jnp.stack(g), *map(jax.jit(of_one(action)), x))


@pytest.mark.quick("recompute")
@each_action
def test_vmap_of_gradients(action):
    want = one_by_one(action if action in LOSSY else None)
    close(jax.jit(jax.vmap(of_one(action)))(models.batch(4, dtype=jnp.float64)), want, 1e-9)


@functools.cache
def second(action):
    p, x = models.parameters(dtype=jnp.float64), models.batch(dtype=jnp.float64)
    first = jax.grad(models.scanned(policy(action)), argnums=1)
    return jax.jit(jax.grad(lambda x: (first(p, x) ** 2).sum()))(x)


@pytest.mark.parametrize("action", ["keep", slow("offload")])
def test_gradient_of_gradient(action):
    close(second(action), second(None), 1e-11)


def test_gradient_of_gradient_through_codes_is_refused():
    p, x = models.parameters(layers=2), models.batch()
    loss = models.scanned(jaxmem.remat_policy(models.draft("compress")))
    with pytest.raises(jaxmem.errors.TagError, match="LOSSLESS"):
        jax.grad(lambda x: (jax.grad(loss, argnums=1)(p, x) ** 2).sum())(x)


def test_forward_over_reverse():
    p, x = models.parameters(dtype=jnp.float64), models.batch(dtype=jnp.float64)

    def product(action):
        first = jax.grad(models.scanned(policy(action)), argnums=1)
        return jax.jit(lambda x: jax.jvp(first, (p, x), (p, x))[1])(x)

    close(product("offload"), product(None), 1e-11)


@each_action
def test_shard_map(action):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    p, x = models.parameters(dtype=jnp.float64), models.batch(dtype=jnp.float64)
    loss = models.scanned(policy(action))
    mean = lambda p, x: jax.lax.pmean(loss(p, x), "data")
    sharded = jax.shard_map(mean, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    close(jax.jit(jax.grad(sharded))(p, x), gradients(models.scanned, action)[1], 1e-12)


def test_checkpoint_name_values_are_tags():
    def block(x, p, key):
        return x + jnp.sin(checkpoint_name(jnp.sin(x @ p["a"]), "h"))

    p, x = models.parameters(dtype=jnp.float64), models.batch(dtype=jnp.float64)
    want = jax.jit(jax.grad(models.scanned(None, block)))(p, x)
    for choice in (KEEP, RECOMPUTE, OFFLOAD):
        named = jaxmem.remat_policy(Assignment({"block": {"h": choice}}))
        close(jax.jit(jax.grad(models.scanned(named, block)))(p, x), want, 1e-12)


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (jaxmem.ops.softmax, jax.nn.softmax),
        (jaxmem.ops.tanh, jnp.tanh),
        (jaxmem.ops.sigmoid, jax.nn.sigmoid),
        (jaxmem.ops.exp, jnp.exp),
    ],
)
def test_self_tagged_operations(ours, plain):
    w, x = (jnp.asarray(np.random.default_rng(n).standard_normal((n, 16))) for n in (16, 4))
    f = lambda op: lambda x, w: (op(x @ w) ** 3).sum()
    mine = f(functools.partial(ours, name="y"))
    both = jax.jit(
        lambda f, x, w: (jax.grad(f)(x, w), jax.jvp(f, (x, w), (x, w))), static_argnums=0
    )
    close(both(mine, x, w), both(f(plain), x, w), 1e-11)

    def products(op) -> int:
        stored = jaxmem.remat_policy(Assignment({"block": {"y": KEEP}}))
        gradient = jax.grad(jax.checkpoint(f(op), policy=stored), argnums=(0, 1))
        return str(jax.make_jaxpr(gradient)(x, w)).count("dot_general")

    tag_after = lambda x: jaxmem.tag(plain(x), "y")
    assert products(functools.partial(ours, name="y")) == 3, "x @ w, and two of its derivative"
    assert products(tag_after) == 4, "a tag after the operation leaves x @ w to be recomputed"


@pytest.mark.parametrize("of", [jaxmem.ops.softmax, jaxmem.ops.tanh])
def test_self_tagged_operations_refuse_integers(of):
    with pytest.raises(jaxmem.errors.TagError, match="tag 'y' has dtype int32"):
        of(jnp.arange(4, dtype=jnp.int32), "y")


def test_jaxmem_is_imported_under_remat3():
    program = (
        "import jax, jaxmem._model.tags.primitive as p; print(p.name_p, jax.config.jax_remat3)"
    )
    environment = children.finding_packages() | {"JAX_REMAT3": "1"}
    done = children.python("-c", program, environment=environment)
    assert done.stdout.strip() == f"{name_p} True"


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="JAX 0.12 has the rules of hijax.py")
def test_remat3_is_refused():
    jax.config.update("jax_remat3", True)
    try:
        with pytest.raises(jaxmem.errors.TagError, match="jax_remat3"):
            jaxmem.remat_policy(None)
    finally:
        jax.config.update("jax_remat3", False)


@refused(
    jaxmem.errors.TagError,
    (lambda: jaxmem.tag(jnp.zeros(3), ""), "`name` is ''"),
    (lambda: jaxmem.tag(jnp.zeros(3), "*"), "other than"),
    (lambda: jaxmem.tag(jnp.zeros(3), 3), "`name` is 3"),
    (lambda: jaxmem.tag(jnp.zeros(3), "x", kind="lineer"), "linear"),
    (lambda: jaxmem.tag(jnp.zeros(3), "x", codec="grouped_symetric()"), "grouped_symmetric"),
    (lambda: jaxmem.tag({"a": jnp.zeros(3)}, "x"), "`x` of the tag 'x' is dict; expected one"),
    (lambda: jaxmem.tag(None, "x"), "`x` of the tag 'x' is NoneType"),
    (lambda: jaxmem.remat_policy({"x": "keep"}), "`plan` is dict"),
    (lambda: jaxmem.remat_policy(None, block=""), "`block` is ''"),
)
def test_wrong_arguments(call):
    call()


RULES = partial_eval.partial_eval_jaxpr_custom_rules
words = jax.checkpoint_policies
OFFLOADING = words.save_and_offload_only_these_names(
    names_which_can_be_saved=["b"],
    names_which_can_be_offloaded=["a", "c"],
    offload_src="device",
    offload_dst="pinned_host",
)
# What others give to `jax.checkpoint`, and JAX carries out by itself.
FOREIGN = {
    "names": words.save_only_these_names("a", "c"),
    "others": words.save_any_names_but_these("a"),
    "everything": words.everything_saveable,
    "nothing": words.nothing_saveable,
    "products": words.dots_saveable,
    "both": words.save_from_both_policies(words.dots_saveable, words.save_only_these_names("a")),
}


@pytest.fixture
def without_rule():
    """Leaves the rule out while a test runs, as in a process that compresses nothing."""
    rule = RULES.pop(name_p, None)
    jax.clear_caches()
    yield
    RULES.pop(name_p, None)
    if rule is not None:
        RULES[name_p] = rule
    jax.clear_caches()


def layer(x, w):
    """Names in the block, and one of them in a loop of it too."""
    a = checkpoint_name(jnp.sin(x @ w), "a")
    b = checkpoint_name(jnp.cos(a @ w), "b")

    def step(c, row):
        c = checkpoint_name(jnp.tanh(c * row), "a")
        return c, c

    _, rows = jax.lax.scan(step, b[0], b)
    return x + checkpoint_name(jnp.sin(rows), "c")


def gradient(policy):
    def loss(x, ws):
        one = jax.checkpoint(layer, policy=policy)
        y = one(jax.lax.scan(lambda x, w: (one(x, w), None), x, ws)[0], ws[0])
        return y.sum()

    return jax.grad(loss, argnums=(0, 1))


ARGS = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((2, 4, 4), jnp.float32)


def programs(policy) -> tuple[str, str]:
    """The gradient's jaxpr, and that of a derivative of it, without addresses."""
    first = gradient(policy)
    second = lambda x, ws: jax.jvp(lambda x: first(x, ws)[0], (x,), (x,))
    text = lambda f: re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(f)(*ARGS)))
    return text(first), text(second)


@pytest.mark.parametrize("policy", FOREIGN.values(), ids=FOREIGN)
def test_programs_under_other_policies_are_the_same_to_the_letter(without_rule, policy):
    before = programs(policy)
    let_names_be_encoded()
    jax.clear_caches()
    assert programs(policy) == before
    assert "name=a" in before[0]


def test_a_policy_that_offloads_compiles_to_the_same_program(without_rule):
    """XLA inlines the call that the copies stand in."""

    def compiled():
        made = jax.jit(gradient(OFFLOADING)).lower(*ARGS).compile()
        # Numbers of instructions depend on what the process compiled before.
        text = re.sub(r"metadata=\{[^}]*\}|, stack_frame_id=\d+", "", made.as_text())
        text = re.sub(r"([A-Za-z_][\w-]*)(?:\.\d+)+", r"\1", text)  # of names, and not of values
        return text.split("FileNames")[0], made.memory_analysis().temp_size_in_bytes

    before = compiled()
    spaces = lambda: re.findall(
        r"f32<host>\[[\d,]*\]", str(jax.make_jaxpr(gradient(OFFLOADING))(*ARGS))
    )
    hosted = set(spaces())
    let_names_be_encoded()
    jax.clear_caches()
    assert compiled() == before
    assert set(spaces()) == hosted != set()


@pytest.mark.parametrize("action", ["offload", "compress", "compress_offload"])
def test_the_rule_is_there_once_a_policy_compresses_or_offloads(without_rule, action):
    for plan in (None, models.draft("keep"), models.draft("recompute")):
        jaxmem.remat_policy(plan)
        assert name_p not in RULES
    jaxmem.remat_policy(models.draft(action))
    assert name_p in RULES


def spun(x):
    return jnp.abs(jnp.sin(checkpoint_name(jnp.exp(jax.lax.complex(x, x)), "spun"))).sum()


@pytest.mark.todays_checkpoint
def test_a_complex_value_is_stored_where_the_rule_is_and_else_refused(without_rule):
    x = jnp.linspace(0.1, 1, 8)
    of = lambda plan: jax.grad(jax.checkpoint(spun, policy=jaxmem.remat_policy(plan)))
    gradient = lambda plan: jax.jit(of(plan))(x)
    want = jax.jit(jax.grad(spun))(x)
    assert np.abs(want).min() > 0
    stored = Assignment({"block": {"spun": "keep"}})
    for plan in (None, Assignment.nothing()):  # both recompute it
        np.testing.assert_allclose(gradient(plan), want, rtol=1e-12)
    said = r"value 'spun' that is complex128, and the plan says keep.*jaxmem\.tag"
    with pytest.raises(TagError, match=said):
        gradient(stored)
    offloaded = Assignment({"block": {"spun": "offload"}})
    np.testing.assert_allclose(gradient(offloaded), want, rtol=1e-12)
    jax.clear_caches()
    np.testing.assert_allclose(gradient(stored), want, rtol=1e-12)


def block(x, p, key):
    return x + jnp.sin(checkpoint_name(jnp.sin(x @ p["up"]), "h")) @ p["down"]


def tagged(x, p, key):
    return x + jnp.sin(jaxmem.tag(jnp.sin(x @ p["up"]), "h")) @ p["down"]


@functools.cache
def gradients_of_names(block, choice):
    policy = None if choice is None else jaxmem.remat_policy(Assignment({"block": {"h": choice}}))
    p, x = models.parameters(dtype=jnp.float64), models.batch(dtype=jnp.float64)
    return jax.jit(jax.value_and_grad(models.scanned(policy, block), argnums=(0, 1)))(p, x)


@pytest.mark.parametrize("action", ["compress", "compress_offload"])
def test_a_compressed_name_is_a_compressed_tag(action):
    choice = Choice(action, models.CODEC["in"])
    got, want = gradients_of_names(block, choice), gradients_of_names(tagged, choice)
    plain = gradients_of_names(block, None)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-12), got, want)
    assert got[0] == plain[0], "the forward is exact"
    assert farthest(got[1], plain[1]) > 1e-6, "the codes are what the backward reads"

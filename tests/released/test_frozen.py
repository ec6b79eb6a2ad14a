"""Released steps of losses with frozen parameters: LoRA, decoded 8-bit weights, filters of NNX.

The oracle differentiates the trained parameters alone, and updates them by optax.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem
from jaxmem._trace.jaxpr import equations
from jaxmem.errors import NoLayersError, OptimizerError
from jaxmem.plans import Assignment
from tests.released.test_loss import trained
from tests.released.test_streamed_deviceless import compiled
from tests.shared.compare import close

pytestmark = [pytest.mark.core, pytest.mark.standard_promotion]
WIDTH, LAYERS, RANK = 16, 4, 2


def batch(rows=8):
    return jax.random.normal(jax.random.key(3), (rows, WIDTH), jnp.float64)


def lora_parameters(layers=LAYERS):
    """Frozen: the embedding, `up`, `down`, and weights in 8 bits with their scales."""
    keys = iter(jax.random.split(jax.random.key(0), 20))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.float64) / 4
    stacks = {
        "a": normal(layers, WIDTH, RANK),
        "b": normal(layers, RANK, 2 * WIDTH),
        "coded": jax.random.randint(next(keys), (layers, WIDTH, WIDTH), 0, 255, jnp.uint8),
        "down": normal(layers, 2 * WIDTH, WIDTH),
        "scale": normal(layers, WIDTH) / 100,
        "up": normal(layers, WIDTH, 2 * WIDTH),
    }
    outer = {"embedding": normal(WIDTH, WIDTH), "head": normal(WIDTH, 3), "gain": normal(WIDTH)}
    return outer | {"layers": stacks}


def adapted_layer(x, p, gain):
    h = jnp.tanh(x @ p["up"] + x @ p["a"] @ p["b"])
    decoded = (p["coded"].astype(x.dtype) - 128) * p["scale"]
    return x + h @ p["down"] + jnp.sin(x) @ decoded * gain


def with_lora(params, x):
    layer = lambda x, p: (adapted_layer(x, p, params["gain"]), None)
    x, _ = jax.lax.scan(layer, x @ params["embedding"], params["layers"])
    return ((x @ params["head"]) ** 2).mean()


def in_a_python_loop(params, x):
    x = x @ params["embedding"]
    for p in params["layers"]:
        x = adapted_layer(x, p, params["gain"])
    return ((x @ params["head"]) ** 2).mean()


def loop_parameters():
    params = lora_parameters()
    slices = [jax.tree.map(lambda a, i=i: a[i], params["layers"]) for i in range(LAYERS)]
    return params | {"layers": slices}


TRAINED = {"a", "b", "head"}


def of_names(names):
    """A mask by the last name of each path."""
    return lambda params: jax.tree.map_with_path(lambda path, _: path[-1].key in names, params)


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 32, rngs=rngs, param_dtype=jnp.float64)
        self.a = nnx.LoRAParam(jax.random.normal(rngs.params(), (WIDTH, RANK), jnp.float64))
        self.b = nnx.LoRAParam(jax.random.normal(rngs.params(), (RANK, 32), jnp.float64))
        self.down = nnx.Linear(32, WIDTH, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        return x + self.down(nnx.silu(self.up(x) + x @ self.a[...] @ self.b[...]))


def nnx_scan():
    """An `nnx.State` whose trained part is a filter of NNX."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    graph, state = nnx.split(nnx.vmap(lambda key: Adapted(nnx.Rngs(key)))(keys))

    def loss(params, x):
        layer = lambda x, state: (nnx.merge(graph, state)(x), None)
        return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

    is_trained = nnx.filterlib.to_predicate(nnx.LoRAParam)
    return loss, state, lambda params: nnx.map_state(is_trained, params)


class Module(eqx.Module):
    """A tree that can be called."""

    params: dict

    def __call__(self, x):
        return with_lora(self.params, x)


def equinox_module():
    """A mask in the tree of a module."""
    params = lora_parameters()
    mask = Module(of_names(TRAINED)(params))
    return lambda module, x: module(x), Module(params), mask


MODELS = {
    "LoRA": lambda: (with_lora, lora_parameters(), of_names(TRAINED)),
    "adapters alone": lambda: (with_lora, lora_parameters(), of_names({"a", "b"})),
    "one array": lambda: (with_lora, lora_parameters(), of_names({"a"})),
    "frozen outside the layers": lambda: (
        with_lora,
        lora_parameters(),
        of_names({"a", "b", "up", "down", "scale", "head"}),
    ),
    "a prefix": lambda: (
        lambda params, x: with_lora(params["model"] | {"head": params["head"]}, x),
        {"model": lora_parameters(), "head": lora_parameters()["head"]},
        {"model": of_names({"a", "b"})(lora_parameters()), "head": True},
    ),
    "NNX's filter": nnx_scan,
    "Equinox": equinox_module,
    "a Python loop": lambda: (in_a_python_loop, loop_parameters(), of_names(TRAINED)),
    "adapters alone in a Python loop": lambda: (
        in_a_python_loop,
        loop_parameters(),
        of_names({"a", "b"}),
    ),
}


def mask_of(trainable, params):
    is_function = callable(trainable) and not isinstance(trainable, eqx.Module)
    mask = trainable(params) if is_function else trainable
    spread = lambda flag, branch: jax.tree.map(lambda _: flag, branch)
    return jax.tree.map(spread, mask, params)


def divided(params, mask):
    """The trained and the frozen parameters, each with None in place of the others."""
    keep = lambda wanted: jax.tree.map(lambda a, flag: a if flag == wanted else None, params, mask)
    return keep(True), keep(False)


def whole(trained, frozen):
    one = lambda a, b: b if a is None else a
    return jax.tree.map(one, trained, frozen, is_leaf=lambda a: a is None)


def plain_step(tx, loss, mask):
    """Differentiates the trained parameters alone."""

    def step(state, x):
        trained, frozen = divided(state[0], mask)
        value, gradient = jax.value_and_grad(lambda t: loss(whole(t, frozen), x))(trained)
        updates, moments = tx.update(gradient, state[1], trained)
        return (whole(optax.apply_updates(trained, updates), frozen), moments), {"loss": value}

    return step


def numbers(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), jax.device_get(tree))


def is_bit_equal(before, after, mask):
    """Whether the frozen parameters have their bits, and the trained ones have moved."""
    pairs = zip(*map(jax.tree.leaves, (mask, before, after)))
    return all(np.array_equal(a, b) != flag for flag, a, b in pairs)


def adam():
    return optax.adamw(1e-2, eps=0.01, weight_decay=0.1)


@pytest.mark.quick("LoRA", "one array", "a prefix", "Equinox", "a Python loop")
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_are_those_of_the_plain_step(name):
    loss, params, trainable = MODELS[name]()
    tx, mask = adam(), mask_of(trainable, params)
    step = jaxmem.released_step(tx, loss, trainable=trainable)
    first = step.init(params, batch())
    moments = tx.init(divided(params, mask)[0])
    assert jax.tree.structure(first) == jax.tree.structure((params, moments))
    got, metrics = trained(step, first, (batch(),), 10)
    want, expected = trained(plain_step(tx, loss, mask), first, (batch(),), 10)
    close(numbers(got), numbers(want), 1e-12)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-12)
    assert is_bit_equal(params, got[0], mask)
    dtypes = lambda tree: [a.dtype for a in jax.tree.leaves(tree)]
    assert dtypes(got[0]) == dtypes(params)


OPTIMIZERS = {
    "AdamA": lambda: jaxmem.adama(0.01, eps=1e-3, accumulation_steps=2),
    "rows": lambda: jaxmem.adama(0.01, eps=1e-3, accumulation_steps=2, second_moment="row"),
    "8 bits": lambda: jaxmem.quantized(optax.adamw(0.01, eps=1e-3)),
    "AdamW": adam,
}
PLACES = {
    "streamed": {"persist": 0},
    "some resident": {"persist": 2, "outer_moments": "pinned_host"},
    "copies and buffers": {"persist": 1, "copies": 1, "buffers": 1},
}


@pytest.mark.parametrize("name", ["LoRA", "a Python loop", "Equinox"])
def test_a_mask_of_weight_decay_has_the_tree_of_the_parameters(name):
    loss, params, trainable = MODELS[name]()
    decays = of_names({"a"})
    adamw = functools.partial(jaxmem.adamaw_a, 0.01, eps=1e-3, weight_decay=0.5)
    step = plain_step(adamw(mask=decays), loss, mask_of(trainable, params))
    for mask in (decays, decays(params)):
        made = jaxmem.released_step(adamw(mask=mask), loss, trainable=trainable)
        first = made.init(params, batch())
        got, want = (trained(s, first, (batch(),), 2)[0] for s in (made, step))
        close(numbers(got), numbers(want), 1e-12)


@pytest.mark.parametrize("clip", [None, ("norm", 0.1)])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("tx", OPTIMIZERS)
@pytest.mark.quick("AdamA-streamed-None", "AdamW-copies and buffers-clip1")
def test_frozen_layers_in_host_memory_train_as_resident_layers_do(tx, where, clip):
    loss, params, trainable = MODELS["LoRA"]()
    step = jaxmem.released_step(OPTIMIZERS[tx](), loss, clip=clip, trainable=trainable)
    state, bound = step.init(params, batch()), step.of(params, batch())
    places = PLACES[where]
    split = bound.split(jax.tree.map(jnp.copy, state), **places)
    persist, copies = places["persist"], places.get("copies", 0)
    memories = ["device"] * (persist > 0) + ["device"] * (copies > 0) + ["pinned_host"]
    for name in ("up", "coded"):  # a copied layer's frozen arrays are in device memory alone
        assert [a.sharding.memory_kind for a in jax.tree.leaves(split[0]["layers"][name])] == (
            memories
        )
    want, _ = trained(step, state, (batch(),), 3)
    got = bound.joined(trained(step, split, (batch(),), 3)[0])
    assert jax.tree.structure(got) == jax.tree.structure(want)
    close(numbers(got), numbers(want), 1e-11)
    assert is_bit_equal(params, jax.device_get(got[0]), mask_of(trainable, params))


@pytest.mark.parametrize("tx", OPTIMIZERS)
def test_frozen_layers_of_a_python_loop_stream(tx):
    loss, params, trainable = MODELS["a Python loop"]()
    step = jaxmem.released_step(OPTIMIZERS[tx](), loss, trainable=trainable)
    state = step.init(params, batch())
    split = step.of(params, batch()).split(jax.tree.map(jnp.copy, state), 1)
    memories = [layer["coded"].sharding.memory_kind for layer in split[0]["layers"]]
    assert memories == ["device", *["pinned_host"] * (LAYERS - 1)]
    got, want = (trained(step, s, (batch(),), 3)[0] for s in (split, state))
    close(numbers(got), numbers(want), 1e-11)
    assert is_bit_equal(params, jax.device_get(got[0]), mask_of(trainable, params))


def test_frozen_layers_may_be_in_host_memory_from_the_start():
    loss, params, trainable = MODELS["LoRA"]()
    step = jaxmem.released_step(adam(), loss, trainable=trainable)
    want, _ = trained(step, step.init(params, batch()), (batch(),), 3)
    there = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(jax.devices()[:1]), "x"),
        jax.sharding.PartitionSpec(),
        memory_kind="pinned_host",
    )
    far = {
        name: a if name in TRAINED else jax.device_put(a, there)
        for name, a in params["layers"].items()
    }
    state = step.init(params | {"layers": far}, batch())
    got, _ = trained(step, state, (batch(),), 3)
    assert got[0]["layers"]["up"].sharding.memory_kind == "pinned_host"
    close(numbers(got), numbers(want), 1e-11)


def shapes_within(step, state, *args):
    """The shapes that the operations of a step make: by primitive."""
    closed = jax.make_jaxpr(step)(state, *args)
    return {
        (eqn.primitive.name, v.aval.shape)
        for eqn in equations(closed.jaxpr)
        for v in eqn.outvars
        if hasattr(v.aval, "shape")
    }


@pytest.mark.parametrize("name", ["LoRA", "a Python loop"])
def test_no_gradient_of_a_frozen_parameter_is_computed(name):
    """A gradient of a weight is a product of the weight's shape. Without frozen parameters, the
    step has such products."""
    loss, params, trainable = MODELS[name]()
    weights = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH), "embedding": (WIDTH, WIDTH)}
    gradients = {("dot_general", s) for shape in weights.values() for s in (shape, shape[::-1])}
    step = jaxmem.released_step(adam(), loss, trainable=trainable)
    assert not gradients & shapes_within(step, step.init(params, batch()), batch())
    some = of_names(TRAINED | {"up", "down", "embedding"})
    trains = jaxmem.released_step(adam(), loss, trainable=some)
    found = gradients & shapes_within(trains, trains.init(params, batch()), batch())
    assert {shape for _, shape in found} >= {*weights.values()}


def test_the_compiled_step_has_no_temporary_of_a_frozen_weight_or_gradient():
    """Wide frozen layers, and few rows: a CPU copies one layer's slices, and the temporaries are
    little more. If the weights are trained, their gradients take one layer more."""
    wide = 256
    frozen = {"up": jnp.ones((LAYERS, wide, 2 * wide)), "down": jnp.ones((LAYERS, 2 * wide, wide))}
    lora = {"a": jnp.ones((LAYERS, wide, 1)), "b": jnp.ones((LAYERS, 1, 2 * wide))}
    params = {"layers": frozen | lora, "head": jnp.ones((wide, 1))}

    def loss(params, x):
        def layer(x, p):
            return x + jnp.tanh(x @ p["up"] + x @ p["a"] @ p["b"]) @ p["down"], None

        return ((jax.lax.scan(layer, x, params["layers"])[0] @ params["head"]) ** 2).mean()

    def temporaries(trainable):
        step = jaxmem.released_step(optax.sgd(0.1), loss, trainable=trainable)
        lowered = jax.jit(step, donate_argnums=0).lower(step.init(params, x), x)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    x = jnp.ones((2, wide))
    layer = sum(a.nbytes for a in frozen.values()) // LAYERS
    some, everything = temporaries(of_names({"a", "b", "head"})), temporaries(None)
    assert some < 1.1 * layer
    assert everything > 1.9 * layer


def test_decoded_weights_are_not_saved():
    """The weights in 8 bits are decoded again in the backward. If `coded` were trained in its
    decoded form, the layers' loop would read a stack of it; here no operation makes one."""
    loss, params, trainable = MODELS["LoRA"]()
    for plan in (None, Assignment.everything()):
        step = jaxmem.released_step(adam(), loss, trainable=trainable, plan=plan)
        made = shapes_within(step, step.init(params, batch()), batch())
        assert (LAYERS, WIDTH, WIDTH) not in {shape for _, shape in made}
        assert (WIDTH, WIDTH) in {shape for _, shape in made}


@pytest.mark.parametrize("name", ["LoRA", "a Python loop"])
@pytest.mark.parametrize("plan", [Assignment.nothing(), Assignment.everything()])
def test_a_plan_changes_no_value(plan, name):
    loss, params, trainable = MODELS[name]()
    step = functools.partial(jaxmem.released_step, adam(), loss, trainable=trainable)
    state = step().init(params, batch())
    got, want = (trained(step(plan=p), state, (batch(),), 3)[0] for p in (plan, None))
    close(numbers(got), numbers(want), 1e-11)


def test_frozen_states_are_planned():
    """The budget is below the bytes of the step with everything recomputed and resident."""
    loss, params, trainable = MODELS["LoRA"]()
    # The frozen weights are most of the bytes.
    build = lambda plan: jaxmem.released_step(adam(), loss, plan=plan, trainable=trainable)
    state = build(None).init(params, batch(64))
    shapes = jax.eval_shape(lambda *a: a, state, batch(64))
    least = jaxmem.plans.price(build, Assignment.nothing(), *shapes).compiled_bytes
    layer = sum(a.nbytes for a in jax.tree.leaves(params["layers"])) // LAYERS
    budget = least - layer
    want, _ = trained(build(None), state, (batch(64),), 3)
    options = {"decide": ("actions", "states"), "actions": jaxmem.plans.LOSSLESS}
    fitted = jaxmem.jit(build(None), budget, **options)
    got = fitted.init(jax.tree.map(jnp.copy, params), batch(64))
    for _ in range(3):
        got, _ = fitted(got, batch(64))
    assert fitted.plan.compiled_bytes <= budget
    assert fitted.plan.places.persist < LAYERS
    frozen = sum(a.nbytes for k, a in params["layers"].items() if k not in TRAINED) // LAYERS
    assert fitted.plan.host_bytes >= fitted.plan.places.streamed * frozen
    close(numbers(fitted.joined(got)), numbers(want), 1e-11)


@pytest.mark.parametrize(
    ("trainable", "says"),
    [
        ({"layers": True}, "`trainable` does not fit `params`"),
        (of_names({"none"}), "`trainable` trains no parameter; expected a tree of booleans"),
        (lambda params: jax.tree.map(lambda a: a.shape, params), r"`trainable` "),
        ("head", "`trainable` has the leaf 'head'|`trainable` does not fit"),
        (nnx.LoRAParam, "`trainable` .*nnx.filterlib.to_predicate"),
        (nnx.All(nnx.LoRAParam), "`trainable` .*nnx.filterlib.to_predicate"),
        (of_names({"coded", "head"}), r"\['coded'\]` is uint8; expected .* a `trainable` that"),
    ],
)
def test_wrong_masks_are_named(trainable, says):
    loss, params, _ = MODELS["LoRA"]()
    with pytest.raises(OptimizerError, match=says):
        jaxmem.released_step(adam(), loss, trainable=trainable).init(params, batch())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "LoRA",
            "it slices no parameter that is trained.* slices of trained parameters: .* frozen",
        ),
        (
            "a Python loop",
            r"nothing else reads \(a frozen parameter, .* expected trained parameters",
        ),
    ],
)
def test_layers_without_a_trained_parameter_are_refused(name, says):
    loss, params, _ = MODELS[name]()
    with pytest.raises(NoLayersError, match=says):
        jaxmem.released_step(adam(), loss, trainable=of_names({"head"})).init(params, batch())


@pytest.mark.parametrize("names", [None, {"a", "head"}, {"scale", "down", "head"}])
def test_moments_of_another_mask_are_named(names):
    """The third state has as many moments as the step trains parameters."""
    loss, params, trainable = MODELS["LoRA"]()
    step = functools.partial(jaxmem.released_step, jaxmem.adama(0.01), loss)
    floats = {k: v for k, v in params["layers"].items() if k != "coded"}
    whole = params | {"layers": floats}
    made = divided(params, mask_of(of_names(names), params))[0] if names else whole
    state = jaxmem.adama(0.01).init(made)
    says = r"moments in `state\[1\]` and .* differ at \['.*; expected .* for this `trainable`"
    with pytest.raises(OptimizerError, match=says):
        step(trainable=trainable)((params, state), batch())


@pytest.mark.parametrize("frozen", [jax.nn.gelu, "gelu"])
def test_leaves_that_are_no_arrays_are_named(frozen):
    """A module of Equinox has functions among its leaves."""
    loss, params, _ = MODELS["LoRA"]()
    step = jaxmem.released_step(adam(), loss, trainable=of_names(TRAINED))
    says = r"`params\['act'\]` is .*; expected a tree of arrays alone: .*eqx.partition"
    with pytest.raises(OptimizerError, match=says):
        step.init(params | {"act": frozen}, batch())


def test_three_functions_take_no_trainable():
    f = lambda *a: a
    with pytest.raises(OptimizerError, match="`trainable` is given with three functions"):
        jaxmem.released_step(adam(), f, f, f, trainable=True)  # pyright: ignore


@pytest.mark.slow
@pytest.mark.jax_defaults
@pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 1), reason="reads host stacks of a scan at wrong offsets"
)
def test_frozen_layers_are_streamed_on_an_absent_gpu(h200):
    """Host memory has the layers' states alone. Temporaries exceed the temporaries of a step with
    its states on the device by the states of three layers at most.
    """
    width, layers = 512, 8
    make = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((layers, *shape), dtype)
    frozen = {
        "up": make(width, 4 * width),
        "down": make(4 * width, width),
        "coded": make(width, width, dtype=jnp.uint8),
        "scale": make(width),
    }
    adapters = {"a": make(width, 2, dtype=jnp.float32), "b": make(2, 4 * width, dtype=jnp.float32)}
    outer = {
        "embedding": jax.ShapeDtypeStruct((width, width), jnp.float32),
        "gain": jax.ShapeDtypeStruct((width,), jnp.float32),
        "head": jax.ShapeDtypeStruct((width, 3), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((8, width), jnp.float32)
    step = jaxmem.released_step(adam(), with_lora, trainable=of_names(TRAINED))
    params = outer | {"layers": frozen | adapters}
    state = jax.eval_shape(lambda p: step.init(p, x), params)
    nbytes = lambda tree: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
    stored = nbytes(frozen) + 3 * nbytes(adapters)
    found = {}
    for persist in (0, layers):
        args = step.of(params, x).split(state, persist), x
        found[persist] = compiled(h200, step, *args)
        assert found[persist].host_bytes == stored * (layers - persist) // layers
    assert found[layers].temp_bytes < 2 * nbytes(frozen) // layers
    assert found[0].temp_bytes <= found[layers].temp_bytes + 3 * stored // layers

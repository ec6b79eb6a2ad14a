"""Released steps of losses that nobody wrote for a released step: any tree of parameters, and the
loop over layers found in the loss's trace.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem
from jaxmem.plans import Assignment
from tests.released.test_streamed_deviceless import compiled
from tests.shared.compare import close
from tests.shared.foreign import flax_models, libraries, maxtext, plain
from tests.shared.foreign.size import Size

pytestmark = [pytest.mark.core, pytest.mark.standard_promotion]
SIZE = Size(width=32, heads=4, layers=3, batch=4, sequence=12, vocab=40, dtype=jnp.float64)
WIDTH, LAYERS = 16, 4


def nnx_scan(size):
    class Block(nnx.Module):
        def __init__(self, rngs):
            make = functools.partial(nnx.Linear, rngs=rngs, param_dtype=size.dtype)
            self.norm = nnx.RMSNorm(size.width, rngs=rngs, param_dtype=size.dtype)
            self.up, self.down = make(size.width, 64), make(64, size.width)

        def __call__(self, x):
            return x + self.down(nnx.silu(self.up(self.norm(x))))

    keys = jax.random.split(jax.random.key(0), size.layers)
    graph, state = nnx.split(nnx.vmap(lambda key: Block(nnx.Rngs(key)))(keys))
    head = jax.random.normal(jax.random.key(5), (size.width, 10), size.dtype)

    def loss(params, x):
        layer = lambda x, state: (nnx.merge(graph, state)(x), None)
        return ((jax.lax.scan(layer, x, params["blocks"])[0] @ params["head"]) ** 2).mean()

    x = jax.random.normal(jax.random.key(3), (8, 4, size.width), size.dtype)
    return loss, {"blocks": state, "head": head / 5}, (x,)


class ListOfBlocks(nnx.Module):
    def __init__(self, size, rngs):
        make = functools.partial(nnx.Linear, rngs=rngs, param_dtype=size.dtype)
        self.up = nnx.List([make(size.width, 2 * size.width) for _ in range(size.layers)])
        self.down = nnx.List([make(2 * size.width, size.width) for _ in range(size.layers)])
        self.head = make(size.width, 10)

    def __call__(self, x):
        for up, down in zip(self.up, self.down):
            x = x + down(nnx.silu(up(x)))
        return self.head(x)


def nnx_list(size):
    graph, state = nnx.split(ListOfBlocks(size, nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(3), (8, 4, size.width), size.dtype)
    return lambda params, x: (nnx.merge(graph, params)(x) ** 2).mean(), state, (x,)


def checkpoints_in_a_loop(size):
    """Encoder and decoder layers in two Python loops, each layer under a checkpoint."""
    _, params, rest = plain.gemma_in_a_loop(size)
    params |= {"encoder": [plain.layer_parameters(size, 9000 + i) for i in range(size.layers)]}
    layer = jax.checkpoint(functools.partial(plain.gemma_layer, heads=size.heads))
    wider = jax.checkpoint(lambda x, p: plain.gated(x, p))

    def loss(params, batch):
        x = params["embedding"][batch]
        for p in params["encoder"]:
            x = wider(x, p)
        for p in params["layers"]:
            x = layer(x, p)
        return plain.cross_entropy(x[:, :-1] @ params["embedding"].T, batch[:, 1:])

    return loss, params, rest


def converted_in_a_loop(size):
    """All parameters are converted before the first layer, and a mask is computed once."""

    def loss(params, x):
        params = jax.tree.map(lambda a: a.astype(jnp.float32).astype(x.dtype), params)
        kept = jnp.cumsum(jnp.ones_like(x[0], jnp.int32)) % 5 > 0
        for p in params["layers"]:
            x = feed_forward(jnp.where(kept, x, 0), p)
        return (x**2).mean() * kept.sum() / kept.size

    stacked = own(layer_parameters())
    layers = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(LAYERS)]
    return loss, {"layers": layers}, (rows(),)


def layer_parameters(dtype=jnp.float64):
    names = {"up": (LAYERS, WIDTH, 2 * WIDTH), "down": (LAYERS, 2 * WIDTH, WIDTH)}
    keys = iter(jax.random.split(jax.random.key(0), 9))
    made = {k: jax.random.normal(next(keys), s, dtype) / 6 for k, s in names.items()}
    embedding = jax.random.normal(next(keys), (WIDTH, WIDTH), dtype) / 4
    return made | {"embedding": embedding, "shared": jnp.full(WIDTH, 0.9, dtype)}


def rows(dtype=jnp.float64):
    return jax.random.normal(jax.random.key(3), (8, WIDTH), dtype)


def feed_forward(x, p):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def own(params):
    return {k: params[k] for k in ("up", "down")}


def with_keys_and_rates(params, x, key):
    """Layers read slices of computed arrays: keys, and rates that depend on parameters."""
    keys = jax.random.split(key, LAYERS)
    rates = params["shared"][:LAYERS] * 0.5

    def layer(x, given):
        p, key, rate = given
        return feed_forward(x, p) + rate * jax.random.normal(key, x.shape, x.dtype), None

    x = jax.lax.scan(layer, x @ params["embedding"], (own(params), keys, rates))[0]
    return ((x @ params["embedding"].T) ** 2).mean()


def with_a_counter(params, x):
    """A loop that counts, carries an array that it does not change, and indexes by the counter."""
    scales = jnp.linspace(0.5, 1.0, LAYERS, dtype=x.dtype)

    def layer(carry, p):
        i, x, shared = carry
        return (i + 1, feed_forward(x * shared * scales[i], p), shared), x.mean()

    carry = jnp.int32(0), x @ params["embedding"], params["shared"]
    (count, x, _), means = jax.lax.scan(layer, carry, own(params))
    return (x**2).mean() * count + (means**2).sum()


def in_bfloat16(params, x):
    """Stacks are converted before the loop; the first value is read after it again."""
    layers = jax.tree.map(lambda a: a.astype(jnp.float32), own(params))
    first = (x @ params["embedding"]).astype(jnp.float32)
    last = jax.lax.scan(lambda x, p: (feed_forward(x, p), None), first, layers)[0]
    return ((last - first) ** 2).mean().astype(x.dtype)


def checkpointed_head(params, x):
    """A checkpoint outside the loop, and layers under `jax.jit` and `jax.checkpoint`."""
    layer = jax.checkpoint(jax.jit(lambda x, p: (feed_forward(x, p), None)))
    x = jax.jit(lambda p, x: jax.lax.scan(layer, x, p)[0])(own(params), x @ params["embedding"])
    head = jax.checkpoint(lambda w, x: (jnp.tanh(x @ w.T) ** 2).mean())
    return head(params["embedding"], x) + (params["shared"] ** 2).sum()


def small(loss, *others):
    return lambda size: (loss, layer_parameters(), (rows(), *others))


MODELS = {
    "gemma, a scan": plain.gemma_in_a_scan,
    "gemma, a scan of checkpoints": plain.gemma_in_a_scan_of_checkpoints,
    "names twice in a layer": plain.names_twice_in_a_layer,
    "mixture of experts": plain.mixture_of_experts,
    "encoder and decoder": plain.encoder_and_decoder,
    "Linen, nn.scan": functools.partial(flax_models.linen_transformer, scanned=True),
    "Equinox, a scan": functools.partial(libraries.equinox_transformer, scanned=True),
    "MaxText's decoder": maxtext.decoder,
    "NNX, a scan": nnx_scan,
    "keys and rates": small(with_keys_and_rates, jax.random.key(7)),
    "a counter": small(with_a_counter),
    "converted stacks": small(in_bfloat16),
    "a checkpointed head": small(checkpointed_head),
    "gemma, a loop": plain.gemma_in_a_loop,
    "checkpoints in two loops": checkpoints_in_a_loop,
    "converted in a loop": converted_in_a_loop,
    "Linen, a loop": functools.partial(flax_models.linen_transformer, scanned=False),
    "Equinox, a loop": functools.partial(libraries.equinox_transformer, scanned=False),
    "NNX, a list": nnx_list,
    "GPT-2": libraries.gpt2,
    "Whisper": libraries.whisper,
}
TAKES_KEY = "Linen, nn.scan", "Equinox, a scan", "keys and rates", "Linen, a loop"
TAKES_KEY += "Equinox, a loop", "GPT-2", "Whisper"


def moved(params):
    """The parameters, each moved from where zero gradients would hide a fault."""
    keys = iter(jax.random.split(jax.random.key(9), len(jax.tree.leaves(params))))
    near = lambda a: a + 0.02 * jax.random.normal(next(keys), a.shape, a.dtype)
    return jax.tree.map(near, params)


def model(name):
    """Returns a loss of (params, batch) or (params, batch, key), and its arguments."""
    made, params, rest = MODELS[name](SIZE)
    keyed = name in TAKES_KEY
    batch = rest[:-1] if keyed else rest

    def loss(params, batch, *keys):
        value = made(params, *batch, *keys)
        return value[0] if isinstance(value, tuple) else value

    return loss, moved(params), (batch, *rest[len(batch) :])


def trained(step, state, args, steps):
    run = jax.jit(step)
    for _ in range(steps):
        state, metrics = run(state, *args)
    return state, metrics


def plain_step(tx, loss):
    def step(state, batch, *keys):
        params, state = state
        keys = tuple(jax.random.split(key, 1)[0] for key in keys)
        value, gradient = jax.value_and_grad(loss)(params, batch, *keys)
        updates, state = tx.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), {"loss": value}

    return step


def adam():
    # A larger eps: Adam would magnify the rounding of gradients near zero, such as a key's bias.
    return optax.adamw(1e-3, eps=0.01, weight_decay=0.1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick(
    "keys and rates",
    "a counter",
    "converted stacks",
    "converted in a loop",
    "checkpoints in two loops",
    "NNX, a list",
)
def test_ten_steps_are_those_of_the_plain_step(name):
    loss, params, args = model(name)
    tx = adam()
    step = jaxmem.released_step(tx, loss)
    first = step.init(params, *args)
    assert jax.tree.structure(first) == jax.tree.structure((params, tx.init(params)))
    got, metrics = trained(step, first, args, 10)
    want, expected = trained(plain_step(tx, loss), (params, tx.init(params)), args, 10)
    rtol = {"converted stacks": 1e-5, "GPT-2": 1e-6, "Whisper": 1e-6}.get(name, 1e-12)
    close(jax.tree.leaves(got), jax.tree.leaves(want), rtol)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=rtol)
    changed = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (got[0], params)))]
    assert min(changed) > 0


@pytest.mark.parametrize("name", ["a counter", "converted in a loop"])
@pytest.mark.parametrize("tx", [optax.optimistic_gradient_descent, optax.optimistic_adam_v2])
def test_an_optimizer_may_have_python_numbers_in_its_state(name, tx):
    """The state of these optimizers holds a Python boolean."""
    loss, params, args = model(name)
    step = jaxmem.released_step(tx(1e-3), loss)
    got = trained(step, step.init(params, *args), args, 3)[0]
    want = trained(plain_step(tx(1e-3), loss), (params, tx(1e-3).init(params)), args, 3)[0]
    close(jax.tree.leaves(got[0]), jax.tree.leaves(want[0]), 1e-12)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_parameters_may_have_8_bits(dtype):
    def loss(params, x):
        wide = jax.tree.map(lambda a: a.astype(x.dtype), params)
        layer = lambda x, p: (feed_forward(x, p), None)
        return (jax.lax.scan(layer, x, own(wide))[0] ** 2).mean()

    params = jax.tree.map(lambda a: a.astype(dtype), own(layer_parameters()))
    tx, x = optax.sgd(2.0), rows()
    step = jaxmem.released_step(tx, loss)
    got, metrics = trained(step, step.init(params, x), (x,), 3)
    want, expected = trained(plain_step(tx, loss), (params, tx.init(params)), (x,), 3)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-12)
    for a, b, first in zip(*map(jax.tree.leaves, (got[0], want[0], params)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != first).mean() > 0.01


@pytest.mark.parametrize("persist", [0, 2])
@pytest.mark.parametrize(
    "name", ["gemma, a scan", "keys and rates", "a counter", "checkpoints in two loops"]
)
def test_states_in_host_memory_train_as_resident_states_do(name, persist):
    loss, params, args = model(name)
    step = jaxmem.released_step(jaxmem.adama(0.01, eps=1e-4, accumulation_steps=2), loss)
    state = step.init(params, *args)
    bound = step.of(params, *args)
    split = bound.split(jax.tree.map(jnp.copy, state), persist)
    memories = lambda tree: {a.sharding.memory_kind for a in jax.tree.leaves(tree)}
    assert "pinned_host" in memories(split[0])
    assert memories(state) == {"device"}
    want, _ = trained(step, state, args, 5)
    got, _ = trained(step, split, args, 5)
    joined = bound.joined(got)
    assert jax.tree.structure(joined) == jax.tree.structure(want)
    close(*(jax.tree.map(np.asarray, jax.device_get(s)) for s in (joined, want)), 1e-11)


MASK = {"up": True, "down": False, "embedding": True, "shared": False}  # by the user's paths
OTHERS = {
    "a ratio of rows": lambda: jaxmem.adama(
        0.01, eps=1e-3, accumulation_steps=2, second_moment="row"
    ),
    "8 bits": lambda: jaxmem.adama(0.01, eps=1e-3, accumulation_steps=2, moments="int8"),
    "optax in 8 bits": lambda: jaxmem.quantized(optax.adamw(0.01, eps=1e-3)),
    "a mask": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), MASK), optax.sgd(0.1, momentum=0.9)
    ),
}


@pytest.mark.parametrize("clip", [("value", 0.01), ("norm", 0.1)])
@pytest.mark.parametrize("persist", [4, 1])
def test_layers_of_a_python_loop_are_clipped_as_optax_clips(clip, persist):
    loss, params, args = model("converted in a loop")
    how, at = clip
    chained = {"value": optax.clip(at), "norm": optax.clip_by_global_norm(at)}[how]
    step = jaxmem.released_step(adam(), loss, clip=clip)
    split = step.of(params, *args).split(step.init(jax.tree.map(jnp.copy, params), *args), persist)
    got, metrics = trained(step, split, args, 3)
    tx = optax.chain(chained, adam())
    want, _ = trained(plain_step(tx, loss), (params, tx.init(params)), args, 3)
    close(jax.device_get(got[0]), jax.device_get(want[0]))
    assert metrics["skipped_layers"].shape == (LAYERS,)


@pytest.mark.quick("optax in 8 bits")
@pytest.mark.parametrize("tx", [name for name in OTHERS if "8 bits" in name])
def test_layers_of_a_python_loop_with_moments_in_8_bits_stream_as_resident_layers(tx):
    loss, params, args = model("converted in a loop")
    step = jaxmem.released_step(OTHERS[tx](), loss)
    state, bound = step.init(params, *args), step.of(params, *args)
    split = bound.split(jax.tree.map(jnp.copy, state), 1, outer_moments="pinned_host")
    assert {a.dtype.name for a in jax.tree.leaves(split[1])} >= {"int8", "uint8"}
    got, want = (trained(step, s, args, 3)[0] for s in (split, state))
    close(*(jax.tree.map(np.asarray, jax.device_get(s)) for s in (got, want)), 1e-11)


@pytest.mark.parametrize("clip", [("component", 0.1), ("norm", 0.1)])
@pytest.mark.parametrize("tx", OTHERS)
def test_copies_buffers_and_clipping_train_as_resident_states_do(tx, clip):
    loss, params, args = model("keys and rates")
    step = jaxmem.released_step(OTHERS[tx](), loss, clip=clip)
    state, bound = step.init(params, *args), step.of(params, *args)
    where = {"copies": 1, "buffers": 1, "outer_moments": "pinned_host"}
    split = bound.split(jax.tree.map(jnp.copy, state), 1, **where)
    want, _ = trained(step, state, args, 3)
    joined = bound.joined(trained(step, split, args, 3)[0])
    close(*(jax.tree.map(np.asarray, jax.device_get(s)) for s in (joined, want)), 1e-11)


@pytest.mark.parametrize(
    ("name", "second_moment"),
    [("gemma, a scan", "squares"), ("gemma, a loop", "squares"), ("gemma, a loop", "row")],
)
def test_moments_are_those_of_adama_on_whole_gradients(name, second_moment):
    loss, params, args = model(name)
    tx = jaxmem.adama(0.01, eps=1e-4, accumulation_steps=2, second_moment=second_moment)
    step = jaxmem.released_step(tx, loss)

    def whole(state, batch):
        params, moments = state
        moments = tx.begin(moments)
        halves = zip(*(jnp.split(a, 2) for a in jax.tree.leaves(batch)))
        for half in halves:
            part = jax.tree.unflatten(jax.tree.structure(batch), half)
            moments = tx.fold(moments, jax.grad(loss)(params, part))
        updates, moments = tx.finish(moments, params)
        return (optax.apply_updates(params, updates), moments), {}

    got, _ = trained(step, step.init(params, *args), args, 5)
    want, _ = trained(whole, (params, tx.init(params)), args, 5)
    close(got, want, 1e-11)


@pytest.mark.parametrize("name", ["gemma, a scan", "checkpoints in two loops"])
@pytest.mark.parametrize("plan", [Assignment.nothing(), Assignment.everything()])
def test_a_plan_changes_no_value(plan, name):
    loss, params, args = model(name)
    step = lambda plan: jaxmem.released_step(adam(), loss, plan=plan)
    state = step(None).init(params, *args)
    got, want = (trained(step(p), state, args, 3)[0] for p in (plan, None))
    close(got, want, 1e-11)


def test_actions_and_states_are_planned():
    params, args = layer_parameters(), (jax.random.normal(jax.random.key(3), (4096, WIDTH)),)
    build = lambda plan: jaxmem.released_step(adam(), with_a_counter, plan=plan)
    state = build(None).init(params, *args)
    shapes = jax.eval_shape(lambda s: s, (state, *args))
    ends = Assignment.nothing(), Assignment.everything()
    least, most = (jaxmem.plans.price(build, e, *shapes).compiled_bytes for e in ends)
    budget = (least + most) // 2
    plan = jaxmem.plan(build, *shapes, budget=budget, decide=("actions", "states"))
    assert plan.compiled_bytes <= budget < most
    want, _ = trained(build(None), jax.tree.map(jnp.copy, state), args, 3)
    placed = plan.place(state)
    for _ in range(3):
        placed, metrics = plan.step(placed, *args)
    assert np.isfinite(metrics["loss"])
    close(jax.device_get(build(None).of(params, *args).joined(placed)), want, 1e-11)


streams = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 1), reason="reads host stacks of a scan at wrong offsets"
)


@pytest.mark.slow
@pytest.mark.jax_defaults
@streams
@pytest.mark.filterwarnings("ignore:jaxmem. no block's backward reads the tags 'mlpwo'")
@pytest.mark.parametrize("model", [plain.gemma_in_a_scan, maxtext.decoder])
def test_states_are_streamed_on_an_absent_gpu(model):
    """The budget is two thirds of the model states."""
    size = Size(width=256, heads=4, layers=8, batch=2, sequence=64, vocab=256, dtype=jnp.float32)
    made, params, rest = model(size)
    step = lambda plan: jaxmem.released_step(adam(), lambda p, b: made(p, *b), plan=plan)
    state, rest = jax.eval_shape(lambda p, b: (step(None).init(p, b), b), params, rest)
    states = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))
    budget = states * 2 // 3
    plan = jaxmem.plan(
        step, state, rest, budget=budget, target="h200", decide=("actions", "states")
    )
    assert plan.compiled_bytes <= budget
    assert plan.places.streamed > 0
    assert plan.host_bytes >= states * plan.places.streamed // (2 * size.layers)


def test_actions_of_layers_in_two_python_loops_are_planned():
    loss, params, args = model("checkpoints in two loops")
    build = lambda plan: jaxmem.released_step(adam(), loss, plan=plan)
    shapes = jax.eval_shape(lambda *a: a, build(None).init(params, *args), *args)
    plan = jaxmem.plan(build, *shapes, budget="1GiB")
    assert set(plan.actions) == {"auto", "auto_2"}


@pytest.mark.slow
@pytest.mark.jax_defaults
@streams
def test_layers_of_a_python_loop_are_streamed_on_an_absent_gpu(h200):
    """At most two layers' states are in device memory, with one layer's new states."""
    size = Size(width=256, heads=4, layers=6, batch=2, sequence=64, vocab=256, dtype=jnp.float32)
    made, params, rest = plain.gemma_in_a_loop(size)
    step = jaxmem.released_step(adam(), lambda p, batch: made(p, *batch))
    state = jax.eval_shape(lambda p: step.init(p, rest), params)
    layer = 3 * sum(a.size * 4 for a in jax.tree.leaves(params["layers"][0]))
    temporary = {}
    for persist in (0, 6):
        args = step.of(params, rest).split(state, persist), jax.eval_shape(lambda r: r, rest)
        found = compiled(h200, step, *args)
        assert found.host_bytes == (6 - persist) * layer
        temporary[persist] = found.temp_bytes
    assert temporary[0] <= temporary[6] + 3 * layer


def test_no_gradient_outlives_its_layer():
    """The step needs less memory than the plain step by most of the layers' gradients."""
    params = jax.tree.map(lambda a: jnp.tile(a, (1, 8, 8)[: a.ndim]), own(layer_parameters()))
    params |= {"embedding": jnp.ones((WIDTH * 8, WIDTH * 8))}
    layer = sum(a.nbytes for a in own(params).values()) // LAYERS
    x = jnp.ones((4, WIDTH * 8))

    def loss(params, x):
        layers = own(params)
        x = jax.lax.scan(lambda x, p: (feed_forward(x, p), None), x @ params["embedding"], layers)
        return (x[0] ** 2).mean()

    tx = optax.sgd(0.1)
    step = jaxmem.released_step(tx, loss)
    state = step.init(params, x)
    temporaries = [
        jax.jit(s, donate_argnums=0).lower(state, x).compile().memory_analysis().temp_size_in_bytes
        for s in (step, plain_step(tx, loss))
    ]
    assert temporaries[1] - temporaries[0] >= (LAYERS - 2) * layer

"""Plans that place the states of layers in a Python loop."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem._core.assignment import Assignment
from jaxmem._model.states.places import Places
from jaxmem._planner.placement.search import PlacedTrial, PlacementSearch
from jaxmem._planner.placement.steps import PlacedSteps
from jaxmem._target.compile.backend import backend_for
from jaxmem.errors import BudgetError
from jaxmem.plans import Target
from tests.shared.streamed import host_bytes

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("own_database")]
LAYERS, WIDTH, ROWS, SEQUENCE, VOCAB = 6, 128, 4, 16, 32
BOTH = ("actions", "states")
# Programs of jaxlib 0.10 for GPUs may transfer wrong values in loops over host memory.
STREAMS = jax.__version_info__ >= (0, 11)


def nbytes(tree) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def parameters(layers=LAYERS, width=WIDTH):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape) / shape[-1] ** 0.5, jnp.float32)
    one = lambda: {"up": make(width, 4 * width), "down": make(4 * width, width)}
    return {"embedding": make(VOCAB, width), "layers": [one() for _ in range(layers)]}


def batch(seed=1, rows=2 * ROWS):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, VOCAB, (rows, SEQUENCE + 1)), jnp.int32)


def loss(params, tokens, dtype=jnp.float32):
    params = jax.tree.map(lambda a: a.astype(dtype), params)
    x = params["embedding"][tokens[:, :-1]]
    for p in params["layers"]:
        x = x + jnp.tanh(x @ p["up"]) @ p["down"]
    logs = jax.nn.log_softmax((x @ params["embedding"].T).astype(jnp.float32))
    return -jnp.take_along_axis(logs, tokens[:, 1:, None], -1).mean()


def in_bfloat16(params, tokens):
    return loss(params, tokens, jnp.bfloat16)


OPTIMIZERS = {
    "AdamA": lambda: jaxmem.adama(1e-2, accumulation_steps=2),
    "AdamW": lambda: optax.adamw(1e-2),
}


def build_of(tx, loss=loss):
    step = jaxmem.released_step(tx, loss)
    return step.with_plan


def first(build):
    return build(None).init(parameters(), batch())


@pytest.mark.core
@pytest.mark.parametrize("tx", OPTIMIZERS)
def test_the_bytes_of_states_add_up(tx):
    build = build_of(OPTIMIZERS[tx]())
    state = first(build)
    with backend_for(Target.parse("local")) as backend:
        steps = PlacedSteps(build, (state, batch()), backend)
        states = steps.states()
        moved = [steps.args_at(Places(LAYERS, persist)) for persist in (0, 2, LAYERS)]
    assert states.layers == LAYERS
    assert states.resident == nbytes(state) + nbytes(batch())
    # Adam's two moments have the parameters' bytes.
    assert 2 * states.parameters == states.moments == 2 * 4 * 8 * WIDTH**2
    assert states.outside == 2 * nbytes(state[0]["embedding"])
    hosted = [sum(a.size * 4 for a in jax.tree.leaves(m) if _is_far(a)) for m in moved]
    assert hosted == [states.layer * n for n in (LAYERS, LAYERS - 2, 0)]


def _is_far(a) -> bool:
    return a.sharding.memory_kind == "pinned_host"


@pytest.mark.core
def test_a_plan_with_enough_memory_leaves_all_states_on_the_device():
    build = build_of(OPTIMIZERS["AdamA"]())
    state = first(build)
    how = {"decide": BOTH, "actions": jaxmem.plans.LOSSLESS}
    plan = jaxmem.plan(build, state, batch(), budget=6 * nbytes(state), **how)
    assert plan.places.resident
    assert plan.places.layers == LAYERS
    after_two_steps(plan.step, plan.place(state), build, 1e-5)


@pytest.mark.quick("AdamA")
@pytest.mark.parametrize("tx", OPTIMIZERS)
def test_a_plan_within_less_than_the_states_trains_as_the_step_without_one(tx):
    build = build_of(OPTIMIZERS[tx]())
    state = first(build)
    budget = int(0.8 * nbytes(state))
    exact = jaxmem.plans.LOSSLESS
    plan = jaxmem.plan(build, state, batch(), budget=budget, decide=BOTH, actions=exact)
    assert plan.compiled_bytes <= budget
    assert plan.places.persist < LAYERS
    placed = plan.place(state)
    assert host_bytes(placed) == plan.host_bytes > 0
    plain, other = jax.jit(build(None), donate_argnums=0), first(build)
    for seed in range(3):
        placed, found = plan.step(placed, batch(seed))
        other, wanted = plain(other, batch(seed))
        np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-4)
    made = plan.create(jax.tree.map(np.asarray, parameters()))
    want = plan.place(first(build))
    for a, b in zip(*map(jax.tree.leaves, (made, want)), strict=True):
        assert a.sharding.memory_kind == b.sharding.memory_kind
        np.testing.assert_array_equal(a, b)


def after_two_steps(step, state, build, rtol):
    """Asserts that the second loss, after one update, is the loss of the step without a plan."""
    plain, other = jax.jit(build(None)), first(build)
    for seed in range(2):
        state, found = step(state, batch(seed))
        other, wanted = plain(other, batch(seed))
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=rtol)


def test_jit_makes_and_trains_a_state_of_numpy_arrays():
    tx = OPTIMIZERS["AdamW"]()
    budget = int(0.8 * nbytes(first(build_of(tx))))
    released = jaxmem.released_step(tx, loss)
    step = jaxmem.jit(released, budget, decide=BOTH, actions=jaxmem.plans.LOSSLESS)
    state = step.init(jax.tree.map(np.asarray, parameters()), batch())
    assert host_bytes(state) > 0
    after_two_steps(step, state, build_of(tx), 1e-4)


def test_moments_in_8_bits_where_no_plan_with_float_moments_fits():
    build = build_of(OPTIMIZERS["AdamA"]())
    state = first(build)
    # Parameters and float moments take three times the parameters; a step needs more.
    limits = {"budget": 3 * nbytes(state[0]) + 2**18, "host_budget": 2**10}
    with pytest.raises(BudgetError):
        jaxmem.plan(build, state, batch(), decide=BOTH, **limits)
    plan = jaxmem.plan(build, state, batch(), decide=BOTH, lossy_states=True, **limits)
    assert plan.moments == "int8"
    found = plan.step(plan.place(state), batch())[1]
    wanted = jax.jit(build(None))(first(build), batch())[1]
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-4)


@pytest.mark.core
def test_microbatches_are_estimated_as_one():
    """The body of the loop over microbatches is estimated in the order of the program too."""

    def estimated(microbatches):
        build = build_of(jaxmem.adama(1e-2, accumulation_steps=microbatches))
        tokens = batch(rows=ROWS * microbatches)
        state = build(None).init(parameters(), tokens)
        with backend_for(Target.parse("local")) as backend:
            steps = PlacedSteps(build, (state, tokens), backend)
            return steps.estimate(Assignment.nothing(), Places(LAYERS, 0))

    one, several = map(estimated, (1, 3))
    assert several < 1.5 * one


def total(h200, build, layers, width=512):
    """The temporary bytes of a step for an H200, everything recomputed."""
    shapes = jax.eval_shape(lambda: parameters(layers, width))
    state = jax.eval_shape(build(None).init, shapes, batch())
    with backend_for(h200) as backend:
        steps = PlacedSteps(build, (state, batch()), backend)
        found = steps.compile_fully(Assignment.nothing(), steps.resident).compiled
    return found.temp_bytes


def test_no_cast_of_a_parameter_outlives_its_layer():
    """Of two microbatches: a layer more adds less than its parameters in the dtype of compute."""
    build = build_of(OPTIMIZERS["AdamA"](), in_bfloat16)
    target = Target.parse("h200")
    few, more = (total(target, build, layers) for layers in (6, 12))
    a_layer = 2 * 8 * 512**2
    assert more - few < 6 * a_layer // 4


@pytest.mark.slow
@pytest.mark.skipif(not STREAMS, reason="jaxlib's loops over host memory are wrong on GPUs")
@pytest.mark.parametrize("tx", OPTIMIZERS)
def test_a_plan_for_an_absent_gpu_fits(tx):
    build = build_of(OPTIMIZERS[tx](), in_bfloat16)
    shapes = jax.eval_shape(lambda: parameters(12, 1024))
    tokens = jax.ShapeDtypeStruct((8 * ROWS, SEQUENCE + 1), jnp.int32)
    state = jax.eval_shape(build(None).init, shapes, jnp.zeros(tokens.shape, tokens.dtype))
    budget = int(0.7 * nbytes(state))
    actions = ["keep", "recompute", "compress"]
    options = {"target": "h200", "decide": BOTH, "actions": actions}
    plan = jaxmem.plan(build, state, tokens, budget=budget, **options)
    assert plan.compiled_bytes <= budget
    assert 0 < plan.places.persist < 12
    assert plan.compiled_bytes > 0.85 * budget


@pytest.mark.slow
@pytest.mark.skipif(not STREAMS, reason="jaxlib's loops over host memory are wrong on GPUs")
@pytest.mark.parametrize(("target", "least"), [("h200", 0.6), ("a100-80gb", 0.4)])
def test_most_copies_to_the_device_run_beside_products(target, least):
    """Without the options of `options_of`, an A100 waits for all copies."""
    build = build_of(OPTIMIZERS["AdamW"](), in_bfloat16)
    shapes = jax.eval_shape(lambda: parameters(12, 2048))
    tokens = jax.ShapeDtypeStruct((2048, SEQUENCE + 1), jnp.int32)
    state = jax.eval_shape(build(None).init, shapes, jnp.zeros(tokens.shape, tokens.dtype))
    with backend_for(Target.parse(target)) as backend:
        steps = PlacedSteps(build, (state, tokens), backend)
        found = steps.compile_fully(Assignment.nothing(), Places(12, 0)).compiled.transfers
    copies = [t for t in found if not t.to_host and t.nbytes > 2**20]
    size = lambda chosen: sum(t.nbytes * t.runs for t in chosen)
    assert all(t.how == "dma" for t in copies)
    assert size(t for t in copies if t.products) > least * size(copies)


def test_errors_of_two_trials_are_interpolated():
    steps = types.SimpleNamespace(estimate=lambda assignment, places: places)
    search = object.__new__(PlacementSearch)
    search.steps, search.error, search.is_safer = steps, 70, False
    search.assignment = lambda solution: None
    search.trials = []
    at = lambda estimated: types.SimpleNamespace(places=estimated)
    assert search.expected(at(500)) == 570
    compiled = lambda size: types.SimpleNamespace(total=size)
    search.trials = [PlacedTrial(at(k), 0, compiled(k + e)) for k, e in ((200, 20), (400, 100))]
    assert [search.expected(at(k)) for k in (100, 200, 300, 400, 900)] == [120, 220, 360, 500, 1000]

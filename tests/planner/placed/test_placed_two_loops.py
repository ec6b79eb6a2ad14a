"""Plans that place states of a loss with two loops over layers: an encoder and a decoder."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem._core.actions import Action
from jaxmem._core.assignment import Assignment
from jaxmem._cost.profile.options import Allowed
from jaxmem._model.states.places import Places
from jaxmem._planner.placement.plan import read_places
from jaxmem._planner.placement.program import solve_placement
from jaxmem._planner.placement.search import PlacementSearch
from jaxmem._planner.placement.steps import PlacedSteps
from jaxmem._planner.search.trial import Limits
from jaxmem._target.compile.backend import backend_for
from jaxmem.plans import Target
from tests.shared.streamed import host_bytes

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("own_database")]
ENCODER, DECODER, WIDTH, ROWS, SEQUENCE, VOCAB = 3, 4, 64, 4, 64, 32
BOTH = ("actions", "states")
# jaxlib before 0.11 removes the checkpoints of Python loops on a CPU, and its programs for GPUs may
# transfer wrong values in loops over host memory.
keeps_checkpoints = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jaxlib before 0.11: checkpoints and host memory"
)
HERE = (Action.KEEP, Action.RECOMPUTE)  # the actions that leave activations on the device
FORMS = (
    "two scans", "two Python loops", "a scan and a Python loop", "a Python loop and a scan",
)  # fmt: skip


def nbytes(tree) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def encoded(x, p):
    x = x + jnp.tanh(x @ p["query"]) * (x @ p["value"]) @ p["out"]
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def decoded(x, context, p):
    weights = jax.nn.softmax(x @ p["query"] @ context.mT / WIDTH**0.5)
    return encoded(x + weights @ (context @ p["key"]), p)


def parameters(form, width=WIDTH):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape) / shape[-1] ** 0.5, jnp.float32)
    shapes = {"query": 1, "value": 1, "out": 1, "up": 4}
    square = lambda name: make(width, shapes[name] * width)
    one = lambda: {name: square(name) for name in shapes} | {"down": make(4 * width, width)}
    encoder = [one() for _ in range(ENCODER)]
    decoder = [one() | {"key": make(width, width)} for _ in range(DECODER)]
    stacked = lambda layers: jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
    if form in ("two scans", "a scan and a Python loop"):
        encoder = stacked(encoder)
    if form in ("two scans", "a Python loop and a scan"):
        decoder = stacked(decoder)
    return {"embedding": make(VOCAB, width), "encoder": encoder, "decoder": decoder}


def loss(params, batch):
    over = lambda layer, x, layers: (
        jax.lax.scan(lambda x, p: (layer(x, p), None), x, layers)[0]
        if isinstance(layers, dict)
        else in_turn(layer, x, layers)
    )
    context = over(encoded, params["embedding"][batch["source"]], params["encoder"])
    x = params["embedding"][batch["target"][:, :-1]]
    x = over(lambda x, p: decoded(x, context, p), x, params["decoder"])
    logits = x @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"][:, 1:]).mean()


def in_turn(layer, x, layers):
    for p in layers:
        x = layer(x, p)
    return x


def batch(seed=1):
    rng = np.random.default_rng(seed)
    ids = lambda length: jnp.asarray(rng.integers(0, VOCAB, (ROWS, length)), jnp.int32)
    return {"source": ids(SEQUENCE), "target": ids(SEQUENCE + 1)}


def build_of(tx):
    return jaxmem.released_step(tx, loss).with_plan


def first(build, form):
    return build(None).init(parameters(form), batch())


@pytest.mark.core
@pytest.mark.parametrize("form", FORMS)
def test_the_step_under_a_plan_updates_as_the_step_by_optax(form):
    """The plan recomputes the layers of both loops."""
    tx = optax.sgd(0.1, momentum=0.9)
    state = first(build_of(tx), form)
    params, momentum = state
    step = jax.jit(build_of(tx)(Assignment.nothing()))

    @jax.jit
    def plain(params, momentum, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, momentum = tx.update(gradients, momentum, params)
        return value, optax.apply_updates(params, updates), momentum, gradients

    for seed in range(3):
        state, metrics = step(state, batch(seed))
        value, params, momentum, gradients = plain(params, momentum, batch(seed))
        assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradients))
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(state[0]), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.core
@pytest.mark.parametrize("form", FORMS)
def test_the_layers_of_the_largest_loop_have_places(form):
    """The decoder's layers; all other parameters are outside the layers."""
    build = build_of(optax.adamw(1e-2))
    state = first(build, form)
    with backend_for(Target.parse("local")) as backend:
        steps = PlacedSteps(build, (state, batch()), backend)
        states = steps.states()
        far = [steps.args_at(Places(DECODER, persist)) for persist in (0, 2, DECODER)]
    assert states.layers == DECODER
    assert DECODER * states.parameters == nbytes(state[0]["decoder"])
    # Adam's two moments have the parameters' bytes.
    others = state[0]["embedding"], state[0]["encoder"]
    assert states.outside == 2 * nbytes(others)
    assert states.resident == nbytes(state) + nbytes(batch())
    hosted = [_far_bytes(args) for args in far]
    assert hosted == [3 * states.parameters * layers for layers in (DECODER, DECODER - 2, 0)]


def _far_bytes(args) -> int:
    return nbytes([a for a in jax.tree.leaves(args) if a.sharding.memory_kind == "pinned_host"])


def searched(form, backend) -> PlacementSearch:
    build = build_of(optax.adamw(1e-2))
    limits = Limits(10**12, 10**12, 10**12)
    args = first(build, form), batch()
    return read_places((build, args, backend, limits, Allowed(HERE, HERE)))


@pytest.mark.core
@pytest.mark.quick("two scans")
@pytest.mark.parametrize("form", FORMS)
def test_actions_of_the_other_loop_are_decided_with_the_places(form):
    with backend_for(Target.parse("local")) as backend:
        search = searched(form, backend)
        least, fastest = search.least(), solve_placement(search.within(None))
        estimates = [
            search.steps.estimate(search.assignment(s), fastest.places) for s in (least, fastest)
        ]
    other = ({block.name for block in search.profile.blocks} - {search.block.name}).pop()
    assert search.assignment(least).actions[other] != search.assignment(fastest).actions[other]
    assert least.others.saved_bytes < fastest.others.saved_bytes
    # The layers' policies differ too: they are the rest of the difference.
    assert estimates[1] - estimates[0] > fastest.others.saved_bytes / 2
    within = (least.device_bytes + fastest.device_bytes) // 2
    between = solve_placement(search.within(within))
    assert fastest.seconds < between.seconds < least.seconds
    assert between.device_bytes <= within


@pytest.mark.parametrize(
    "form", ["two scans", *(pytest.param(f, marks=keeps_checkpoints) for f in FORMS[1:])]
)
def test_a_plan_within_less_than_the_kept_step_trains_as_it(form):
    """The budget is less than the states and the tensors that the encoder would save."""
    build = build_of(optax.adamw(1e-2))
    state = first(build, form)
    plain = jax.jit(build(None))
    analysis = plain.lower(state, batch()).compile().memory_analysis()
    kept = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    plan = jaxmem.plan(build, state, batch(), budget=int(0.6 * kept), decide=BOTH, actions=HERE)
    assert plan.compiled_bytes <= 0.6 * kept
    placed, other = plan.place(jax.tree.map(jnp.copy, state)), state
    assert host_bytes(placed) > 0
    for seed in range(2):
        placed, found = plan.step(placed, batch(seed))
        other, wanted = plain(other, batch(seed))
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-4)


@pytest.mark.slow
@keeps_checkpoints
@pytest.mark.parametrize("form", FORMS)
def test_a_plan_for_an_absent_gpu_fits(form):
    build = build_of(jaxmem.adama(1e-2))
    state, tokens = jax.eval_shape(
        lambda: (build(None).init(parameters(form, 512), batch()), batch())
    )
    states = nbytes(state)
    budget = int(0.9 * states)
    how = {"decide": BOTH, "actions": HERE}
    plan = jaxmem.plan(build, state, tokens, budget=budget, target="h200", **how)
    assert plan.compiled_bytes <= budget
    assert plan.places.streamed > 0
    names = {label.split("[")[0] for label in plan.actions}
    assert len(names) == 2

"""Run by test_placed_sharded.py on several CPU devices: plans of a released step of a loss, which
divide states over the devices, each trained beside a plain step of one device, as JSON.

python -m tests.shared.worker tests.programs.planned_loss CASE ...
"""

import warnings

import jax
import jax.numpy as jnp
import optax

import jaxmem
from tests.shared.compare import farthest

LAYERS, WIDTH, RANK, VOCAB, STEPS = 6, 64, 4, 32, 3
DECIDE = ("actions", "states", "sharding")
ADAPTERS = {"embedding": False, "layers": {"a": True, "b": True, "down": False, "up": False}}
CASES = {"LoRA": (ADAPTERS, "600KB"), "full": (None, "800KB")}


def parameters():
    keys = iter(jax.random.split(jax.random.key(0), 5))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32) / 8
    stacks = {
        "a": normal(LAYERS, WIDTH, RANK),
        "b": normal(LAYERS, RANK, 2 * WIDTH),
        "down": normal(LAYERS, 2 * WIDTH, WIDTH),
        "up": normal(LAYERS, WIDTH, 2 * WIDTH),
    }
    return {"embedding": normal(VOCAB, WIDTH), "layers": stacks}


def loss(params, tokens):
    def layer(x, p):
        h = jnp.tanh(x @ p["up"] + x @ p["a"] @ p["b"])
        return x + h @ p["down"], None

    x = jax.lax.scan(layer, params["embedding"][tokens], params["layers"])[0]
    scores = jax.nn.log_softmax(x[:, :-1] @ params["embedding"].T)
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()


def batch(seed):
    return jax.random.randint(jax.random.key(seed), (32, 17), 0, VOCAB, jnp.int32)


def adam():
    # A larger eps, so that rounding is not magnified where a gradient is nearly zero.
    return optax.adam(0.01, eps=1e-3)


def alone(mask):
    """The parameters and the losses of a plain step."""
    trains = lambda of: lambda p, q: p if of else jax.lax.stop_gradient(q)
    whole = jax.tree.map(lambda _: True, parameters()) if mask is None else mask
    params, tx = parameters(), adam()
    state, losses = tx.init(params), []

    @jax.jit
    def step(params, state, tokens):
        given = lambda p: jax.tree.map(lambda on, a, b: trains(on)(a, b), whole, p, params)
        value, gradient = jax.value_and_grad(lambda p: loss(given(p), tokens))(params)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    for seed in range(STEPS):
        params, state, value = step(params, state, batch(seed))
        losses.append(float(value))
    return params, losses


def main(*cases):
    warnings.simplefilter("ignore")
    found = {}
    for case in cases:
        mask, budget = CASES[case]

        def build(plan, mask=mask):
            return jaxmem.released_step(adam(), loss, plan=plan, trainable=mask, axis_name="data")

        first = lambda build=build: build(None).init(parameters(), batch(0))
        plan = jaxmem.plan(build, first(), batch(0), budget=budget, decide=DECIDE)
        state, losses = plan.place(first()), []
        one = jaxmem.jit(build(None), budget=budget, decide=DECIDE)
        jitted = one.init(parameters(), batch(0))
        for seed in range(STEPS):
            state, metrics = plan.step(state, batch(seed))
            losses.append(float(metrics["loss"]))
            jitted, _ = one(jitted, batch(seed))
        kinds = {str(a.sharding.spec) for a in jax.tree.leaves(state) if a.ndim > 2}
        loaded = jaxmem.Plan(**{**vars(plan), "_step": None, "_split": None})
        # The other devices at hand are not used.
        single = jaxmem.released_step(adam(), loss, trainable=mask)
        single = jaxmem.jit(single, budget="4MB", decide=("actions", "states"))
        of_one, _ = single(single.init(parameters(), batch(0)), batch(0))
        params, want = alone(mask)
        joined = build(None).of(parameters(), batch(0)).joined(state)[0]
        found[case] = {
            "divided": plan.divided,
            "far": farthest(joined, params),
            "far of jit": farthest(one.joined(jitted)[0], params),
            "moved": farthest(joined, parameters()),
            "losses": [losses, want],
            "budget": plan.budget_bytes,
            "compiled": plan.compiled_bytes,
            "compiled by jit": one.plan.compiled_bytes,
            "verified": jaxmem.verify(loaded, build, first(), batch(0)).compiled_bytes,
            "devices of one": max(len(a.devices()) for a in jax.tree.leaves(of_one)),
            "specs": sorted(kinds),
            "text": str(plan),
        }
    return {"devices": jax.device_count(), "found": found}

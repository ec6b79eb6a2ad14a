"""Run by test_loss_sharded.py on several CPU devices: how far released steps of losses over a mesh
are from gradients of `jax.grad` that an optimizer receives in one piece, as JSON.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmem
from tests.released import test_frozen, test_loss
from tests.shared import meshes
from tests.shared.compare import farthest, relative

jax.config.update("jax_enable_x64", True)
STEPS, N = 3, 2
ROWS = 8 * N
ADAMW = optax.adamw(0.01, eps=1e-3, weight_decay=0.1)


def rows(seed):
    return jax.random.normal(jax.random.key(seed), (ROWS, test_loss.WIDTH), jnp.float64)


def of_layers(loss):
    return loss, test_loss.moved(test_loss.layer_parameters()), None


def of_frozen(loss, parameters):
    return loss, parameters(), test_frozen.of_names(test_frozen.TRAINED)


def reporting(params, x):
    """A loss with values of its microbatch beside it."""
    return test_loss.with_a_counter(params, x), {"mean": x.mean(), "first": x[0]}


def reporting_parameters(params, x):
    """A loss in a Python loop that returns parameters, and views of parameters."""
    up = params["layers"][0]["up"]
    return in_a_loop(params, x), {"first": up, "cast": up.astype(jnp.float32).T, "x": x.mean()}


in_a_loop, loop_parameters, _ = test_loss.converted_in_a_loop(None)
MODELS = {
    "aux in a Python loop": lambda: (reporting_parameters, loop_parameters, None),
    "keys": lambda: of_layers(test_loss.with_keys_and_rates),
    "counter": lambda: of_layers(test_loss.with_a_counter),
    "aux": lambda: of_layers(reporting),
    "LoRA": lambda: of_frozen(test_frozen.with_lora, test_frozen.lora_parameters),
    "Python loop": lambda: (*test_loss.converted_in_a_loop(None)[:2], None),
    "LoRA in a Python loop": lambda: of_frozen(
        test_frozen.in_a_python_loop, test_frozen.loop_parameters
    ),
}


def adama(n: int, axis_name: str | None, **options):
    options = {"eps": 1e-3, "weight_decay": 0.1, "accumulation_steps": n} | options
    return jaxmem.adamaw_a(0.01, axis_name=axis_name, **dict(options))


def mean(trees):
    return jax.tree.map(lambda *each: sum(each) / len(each), *trees)


def wanted(case: "Case"):
    """The parameters after the steps, the losses, and the auxiliary values of the last step: the
    gradient of each microbatch by `jax.grad`, and the optimizer as a transformation.
    """
    name, accumulates, divided, _, options, _, clip = case
    made, params, trainable = MODELS[name]()
    devices = jax.device_count()
    n = N if accumulates else 1
    mask = jax.tree.map(lambda _: True, params) if trainable is None else trainable(params)
    loss = made if "aux" in name else lambda *given: (made(*given), ())
    # The mean gradient over devices is folded into divided moments.
    together = accumulates and divided != "nothing"
    parts = n * devices
    count = 1 if not accumulates else n if together else parts
    tx = adama(count, None, **dict(options)) if accumulates else ADAMW
    if clip is not None:
        how, at = clip
        chained = {"value": optax.clip, "norm": optax.clip_by_global_norm}[how](at)
        tx = optax.chain(chained, tx)
    trained, frozen = test_frozen.divided(params, mask)
    state = tx.init(trained)

    @jax.jit
    def gradient(trained, x, *key):
        whole = lambda t: test_frozen.whole(t, frozen)
        return jax.value_and_grad(lambda t: loss(whole(t), x, *key), has_aux=True)(trained)

    losses, aux = [], None
    for seed in range(STEPS):
        x = rows(seed)
        keys = jax.random.split(jax.random.key(7), parts) if name == "keys" else None
        found = [
            gradient(trained, part, *(() if keys is None else (keys[i],)))
            for i, part in enumerate(x.reshape(parts, -1, x.shape[1]))
        ]
        losses.append(np.mean([value[0] for value, _ in found]))
        aux = jax.tree.map(lambda *each: jnp.stack(each), *(value[1] for value, _ in found))
        gradients = [g for _, g in found]
        if together:
            gradients = [mean(gradients[i::n]) for i in range(n)]
        elif not accumulates:
            gradients = [mean(gradients)]
        for g in gradients:
            updates, state = tx.update(g, state, trained)
            trained = optax.apply_updates(trained, updates)
    return test_frozen.whole(trained, frozen), losses, aux


def same(made, state) -> bool:
    """Whether two states have equal arrays in equal places."""
    equal = lambda a, b: (
        a.sharding.is_equivalent_to(b.sharding, a.ndim)
        and a.sharding.memory_kind == b.sharding.memory_kind
        and np.array_equal(a, b)
    )
    return all(jax.tree.leaves(jax.tree.map(equal, made, state)))


def got(case: "Case"):
    name, accumulates, divided, persist, options, kind, clip = case
    made, params, trainable = MODELS[name]()
    mesh = meshes.line(kind)
    tx = adama(N, "data", **dict(options)) if accumulates else ADAMW
    over = {} if accumulates else {"axis_name": "data"}
    step = jaxmem.released_step(
        tx, made, trainable=trainable, has_aux="aux" in name, clip=clip, **over
    )
    key = (jax.random.key(7),) if name == "keys" else ()
    state = step.init(params, rows(0), *key)
    bound = step.of(params, rows(0), *key)
    specs = bound.specs(params, jax.device_count(), divided)
    state = jax.tree.map(lambda a, spec: meshes.placed(a, mesh, spec), state, specs)
    if persist is not None:
        state = bound.split(state, persist)
    created = None
    if "Python loop" not in name:
        of_host = jax.tree.map(np.asarray, params)
        where = {"persist": test_loss.LAYERS if persist is None else persist}
        where |= {"mesh": mesh, "divided": divided}
        created = same(step.create(of_host, rows(0), *key, **where), state)
    call = jax.jit(step.data_parallel(mesh, divided), donate_argnums=0)
    losses = []
    for seed in range(STEPS):
        state, metrics = call(state, meshes.placed(rows(seed), mesh, P("data")), *key)
        losses.append(float(metrics["loss"]))
    arrays = [a for a in jax.tree.leaves(state) if a.ndim >= 2]
    parts = sum(a.size > a.addressable_data(0).size for a in arrays) / len(arrays)
    places = sorted({a.sharding.memory_kind for a in arrays})
    return bound.joined(state)[0], losses, metrics.get("aux"), parts, places, created


class Case(NamedTuple):
    """A step over the mesh: which model, whether AdamA folds microbatches, the argument `divided`,
    the number of layers on the device if the state is split, AdamA's options, the mesh's
    axes, and how gradients are clipped.
    """

    model: str
    accumulates: bool
    divided: str
    persist: int | None = None
    options: tuple = ()
    kind: AxisType = AxisType.Auto
    clip: tuple[str, float] | None = None


ROW = (("second_moment", "row"),)
QUICK = (
    Case("keys", False, "nothing"),
    Case("counter", True, "nothing"),
    Case("LoRA", False, "layers", 1),
    Case("counter", True, "layers", 1),
    Case("Python loop", True, "nothing"),
    Case("aux", True, "nothing"),
    Case("LoRA in a Python loop", False, "layers", 1),
)
NORM, VALUE = ("norm", 0.1), ("value", 0.01)
MORE = (
    Case("aux in a Python loop", False, "layers", 1),
    Case("aux in a Python loop", True, "layers"),
    Case("Python loop", False, "layers"),
    Case("Python loop", False, "layers", 1, clip=NORM),
    Case("Python loop", True, "layers"),
    Case("Python loop", True, "layers", 1, kind=AxisType.Explicit),
    Case("LoRA in a Python loop", True, "layers", 1),
    Case("LoRA in a Python loop", False, "layers"),
    Case("counter", False, "layers", clip=NORM),
    Case("LoRA", False, "layers", 1, clip=VALUE),
    Case("Python loop", False, "nothing", clip=NORM),
    Case("Python loop", False, "nothing", 1, clip=VALUE),
    Case("keys", True, "nothing"),
    Case("counter", True, "moments"),
    Case("counter", True, "states"),
    Case("counter", True, "layers", kind=AxisType.Explicit),
    Case("counter", False, "layers", 0),
    Case("LoRA", True, "layers", 1),
    Case("LoRA", True, "moments"),
    Case("LoRA", False, "nothing"),
    Case("Python loop", False, "nothing"),
    Case("Python loop", True, "nothing", 1),
    Case("LoRA in a Python loop", True, "nothing"),
    Case("LoRA in a Python loop", False, "nothing", 2),
    Case("aux", False, "nothing"),
    Case("aux", False, "layers"),
    Case("counter", True, "nothing", options=ROW),
    Case("Python loop", True, "nothing", options=ROW),
)


def numbers(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def main(*which):
    found = []
    for case in QUICK if which else (*QUICK, *MORE):
        params, losses, aux, divided, places, created = got(case)
        want = wanted(case)
        one = case._asdict() | {"kind": str(case.kind), "places": places, "parts": divided}
        one["params"] = relative(numbers(params), numbers(want[0]))
        one["losses"] = float(np.max(np.abs(np.subtract(losses, want[1]))))
        one["aux"] = relative(numbers(aux), numbers(want[2])) if "aux" in case.model else 0.0
        one["created"] = created
        one["moved"] = farthest(numbers(params), numbers(MODELS[case.model]()[1]))
        found.append(one)
    return {"devices": jax.device_count(), "found": found}

"""`jaxmem.jit` of steps that change objects of Flax NNX, of methods, and inside other functions."""

import contextlib
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmem
from jaxmem.errors import JaxmemWarning, StepError
from tests.auto.steps import blocks_in, update
from tests.shared import models
from tests.shared.programs import nbytes

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults, pytest.mark.usefixtures("own_cache")]
LAYERS, WIDTH = 4, 32


def loss(params, x, key=None):
    """The loss of layers with dropout by a key."""

    def layer(x, own):
        up = jax.nn.gelu(x @ own["up"])
        if key is not None:
            up = jnp.where(jax.random.bernoulli(key, 0.8, up.shape), up, 0)
        return x + up @ own["down"], None

    return ((jax.lax.scan(layer, x, params)[0] - 1) ** 2).mean()


def step(params, x, key=None):
    value, gradients = jax.value_and_grad(loss)(params, x, key)
    return update(params, gradients), value


def arguments(batch=64):
    every = models.parameters(LAYERS, WIDTH, jnp.float32)
    keys = jax.random.key(1), (batch, WIDTH), jnp.float32
    return {name: every[name] for name in ("up", "down")}, jax.random.normal(*keys)


class State(nnx.Pytree):
    """A train state that is no module."""

    def __init__(self):
        params = arguments()[0]
        self.up, self.down = nnx.Param(params["up"]), nnx.Param(params["down"])
        self.count = nnx.Variable(jnp.int32(0))


def with_rngs(rngs, params, x):
    return step(params, x, rngs.dropout())[1]


def with_state(state, params, x):
    new, value = step({"up": state.up[...], "down": state.down[...]}, x)
    state.up[...], state.down[...] = new["up"], new["down"]
    state.count[...] += 1
    return value


def with_variables(variables, params, x):
    new, value = step(dict(zip(("up", "down"), (v[...] for v in variables))), x)
    for name, variable in zip(("up", "down"), variables):
        variable[...] = new[name]
    return value


def with_metric(metric, params, x):
    value = step(params, x)[1]
    metric.update(values=value)
    return value


OBJECTS = {
    "random streams": (with_rngs, lambda: nnx.Rngs(dropout=1)),
    "pytree": (with_state, State),
    "variables": (with_variables, lambda: [nnx.Param(arguments()[0][n]) for n in ("up", "down")]),
    "metric": (with_metric, lambda: nnx.metrics.Average()),
}


@pytest.mark.quick("random streams", "pytree")
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_changed_as_under_nnx_jit(name):
    function, make = OBJECTS[name]
    ours, theirs, (params, x), jitted = make(), make(), arguments(), nnx.jit(function)
    called = jaxmem.jit(function, "1GiB", donate_argnums=0)
    for _ in range(3):
        assert float(called(ours, params, x)) == pytest.approx(float(jitted(theirs, params, x)))
    changed = [nnx.state(each) if name != "variables" else each for each in (ours, theirs, make())]
    got, want, first = ([*map(jnp.asarray, jax.tree.leaves(each))] for each in changed)
    equal = lambda a, b: bool(jnp.allclose(a, b, rtol=1e-5))
    numbers = [i for i, a in enumerate(want) if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key)]
    assert all(equal(got[i], want[i]) for i in numbers)
    assert not all(equal(got[i], first[i]) for i in numbers)


def test_an_nnx_state_is_an_argument_like_other_trees():
    class Layers(nnx.Module):
        def __init__(self):
            params = arguments()[0]
            self.up, self.down = nnx.Param(params["up"]), nnx.Param(params["down"])

    state = nnx.state(Layers())

    def functional(state, x):
        of = lambda state: loss({"up": state["up"][...], "down": state["down"][...]}, x)
        value, gradients = jax.value_and_grad(of)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    x = arguments()[1]
    want, value = jax.jit(functional)(state, x)
    with pytest.warns(JaxmemWarning, match="held twice"):
        got, ours = jaxmem.jit(functional, "1GiB")(state, x)
    assert float(ours) == pytest.approx(float(value))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5)
    before = jax.tree.leaves(nnx.state(Layers()))
    assert all(jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(state), before, strict=True))


def bytes_inside(made, batch) -> int:
    """Bytes of another jitted function that calls the step."""
    return nbytes(jax.jit(lambda *args: made(*args)).lower(*arguments(batch)).compile())


def test_inside_another_function_other_shapes_have_a_plan_of_their_own():
    budget = nbytes(jax.jit(step).lower(*arguments(1024)).compile()) // 2
    made = jaxmem.jit(step, budget, actions=jaxmem.plans.LOSSLESS, donate_argnums=0)
    made(*arguments(16))
    assert made.plan.compiled_bytes < budget
    first = made.plan
    assert bytes_inside(made, 1024) <= budget
    assert made.plan is not first
    assert bytes_inside(made, 16) <= budget
    assert len(made._known) == 2  # the shorter batch has a plan from outside


@pytest.mark.parametrize("in_mesh", [False, True])
def test_inside_another_function_a_plan_serves_numbers_and_weak_types_that_are_traced(in_mesh):
    def scaled(params, x, rate):
        return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params, x))

    made, (params, x) = jaxmem.jit(scaled, "1GiB", donate_argnums=0), arguments()
    weak = jax.tree.map(lambda a: jax.lax.full_like(a, 0.1), params)
    made(made(jax.tree.map(jnp.copy, weak), x, 0.1), x, 0.1)
    mesh, rate = jax.sharding.AbstractMesh((2,), ("data",)), jnp.float32(0.1)
    with jax.sharding.use_abstract_mesh(mesh) if in_mesh else contextlib.nullcontext():
        for given in (params, weak):
            jax.eval_shape(lambda *args: made(*args), given, x, rate)
    assert len(made._known) == 1


def test_under_a_mesh_the_latest_plan_serves_other_shapes():
    budget = nbytes(jax.jit(step).lower(*arguments(1024)).compile()) // 2
    made = jaxmem.jit(step, budget, actions=jaxmem.plans.LOSSLESS, donate_argnums=0)
    made(*arguments(1024))
    given = arguments(1024), arguments(512)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("data",))):
        counts = [blocks_in(lambda *args: made(*args), *each) for each in given]
    assert counts[0] == counts[1] > 0
    assert len(made._known) == 1


def test_a_step_with_an_attribute_named_args_is_planned():
    class Own:
        args = None

        def __call__(self, params, x):
            return step(params, x)

    made = jaxmem.jit(Own(), "1GiB", donate_argnums=0)
    made(*arguments())
    assert made.plan.compiled_bytes


def test_inside_another_function_the_plan_of_a_sharded_call_serves():
    """The shardings of a tracer are not known."""
    made, args = jaxmem.jit(step, "1GiB", donate_argnums=0), arguments()
    mesh = jax.make_mesh((1,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    made(*jax.device_put(args, sharding))
    assert bytes_inside(made, 64)
    assert len(made._known) == 1


@jax.tree_util.register_static
class Trainer:
    @functools.partial(jax.jit, donate_argnums=1)
    def jitted(self, params, x):
        return step(params, x)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def static(self, params, x):
        return step(params, x)


class EquinoxModule(eqx.Module):
    params: dict

    def step(self, x):
        return eqx.filter_grad(lambda own: loss(own.params, x))(self)

    jitted = eqx.filter_jit(step)


def test_a_jitted_method_receives_its_object():
    params, x = arguments()
    made = jaxmem.jit(Trainer().jitted, "1GiB")
    want, expected = step(params, x)
    got, value = made(params, x)
    assert float(value) == pytest.approx(float(expected))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5)
    assert made.plan.compiled_bytes


def test_a_method_with_a_static_object_is_refused():
    with pytest.raises(StepError, match="static arguments"):
        jaxmem.jit(Trainer().static, "1GiB")(*arguments())


METHODS = {
    "equinox": lambda: EquinoxModule(arguments()[0]).step,
    "eqx.filter_jit": lambda: EquinoxModule(arguments()[0]).jitted,
    "eqx.filter_jit of a method": lambda: eqx.filter_jit(EquinoxModule(arguments()[0]).step),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_a_module_is_refused_with_the_reason(name):
    with pytest.raises(StepError, match=r"holds arrays.* function of the module"):
        jaxmem.jit(METHODS[name](), "1GiB")

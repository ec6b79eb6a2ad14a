"""`jaxmem.jit` in the place of `jax.jit`, `nnx.jit` and `eqx.filter_jit`."""

import copy
import functools
import inspect
import types
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem._core.bytes import show_bytes
from jaxmem._planner import jit, recall
from jaxmem._planner.jit import Compilation, PlannedFunction, needs_no_executable
from jaxmem.errors import BudgetError, JaxmemWarning, StepError
from tests.auto.steps import blocks_in
from tests.shared.foreign import plain as models
from tests.shared.foreign.libraries import EquinoxModel
from tests.shared.foreign.size import SMALL, cross_entropy, perturbed, tokens
from tests.shared.programs import nbytes
from tests.shared.refused import refused

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("own_cache")]
LOSS, PARAMS, (BATCH,) = models.gemma_in_a_scan()
SHARE = 0.75  # of the bytes of the step as it is


def step(params, batch, rate=0.1, *, power: int = 1):
    loss, gradients = jax.value_and_grad(LOSS)(params, batch)
    return jax.tree.map(lambda p, g: p - rate * g**power, params, gradients), loss


def compiled_bytes(function) -> int:
    return nbytes(jax.jit(function, donate_argnums=0).lower(PARAMS, BATCH).compile())


@functools.cache
def budget() -> int:
    return int(SHARE * compiled_bytes(step))


@functools.cache
def expected(rate: float = 0.1, power: int = 1):
    """What the step returns. Without jit, each call would compile the step's loops again."""
    return jax.jit(functools.partial(step, power=power))(PARAMS, BATCH, rate)


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def assert_equal(got, want, rtol=1e-12):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12)


@pytest.fixture(scope="module")
def planned(own_cache) -> PlannedFunction:
    """The step after its first call."""
    made = jaxmem.jit(step, budget(), actions=jaxmem.plans.LOSSLESS, donate_argnums=0)
    made(copied(PARAMS), BATCH)
    return made


def no_search(monkeypatch):
    """Nothing is planned anew from here on."""
    fail = types.SimpleNamespace(__wrapped__=lambda *args, **options: pytest.fail("a search"))
    monkeypatch.setattr(recall, "make_plan", fail)


def failing(found: Compilation, error: Exception) -> Compilation:
    def fails(*_):
        raise error

    return Compilation(found.build, found.plan, fails, found.shapes)


def test_it_computes_the_step_within_the_budget(planned):
    params = copied(PARAMS)
    got = planned(params, BATCH)
    assert_equal(got, expected())
    assert params["embedding"].is_deleted(), "the first argument is donated"
    assert planned.plan.compiled_bytes <= budget() == planned.plan.budget_bytes
    assert not planned.plan.keeps_everything
    assert planned.__name__ == "step"


def test_later_calls_are_calls_of_the_executable(planned, monkeypatch):
    monkeypatch.setattr(PlannedFunction, "_called", lambda *_: pytest.fail("a lookup"))
    params, losses = copied(PARAMS), []
    for _ in range(3):
        params, loss = planned(params, BATCH)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)


def test_a_later_process_searches_nothing(planned, monkeypatch):
    no_search(monkeypatch)
    again = jaxmem.jit(step, budget(), actions=jaxmem.plans.LOSSLESS, donate_argnums=0)
    assert_equal(again(copied(PARAMS), BATCH), expected())
    assert again.plan.actions == planned.plan.actions
    other = jaxmem.jit(step, budget() - 1, actions=jaxmem.plans.LOSSLESS, donate_argnums=0)
    with pytest.raises(pytest.fail.Exception, match="a search"):
        other(copied(PARAMS), BATCH)


def test_a_fresh_plan_is_stored_in_the_place_of_the_earlier_one(planned, monkeypatch):
    options = {"actions": jaxmem.plans.LOSSLESS, "donate_argnums": 0}
    with monkeypatch.context() as patch:
        no_search(patch)
        with pytest.raises(pytest.fail.Exception, match="a search"):
            jaxmem.jit(step, budget(), fresh=True, **options)(copied(PARAMS), BATCH)
    keys = {"remember_plan": [], "recall_plan": []}
    for name, found in keys.items():
        own = getattr(recall.History, name)
        noted = lambda self, *of, own=own, found=found: found.append(of[0]) or own(self, *of)
        monkeypatch.setattr(recall.History, name, noted)
    jaxmem.jit(step, budget(), fresh=True, **options)(copied(PARAMS), BATCH)
    keys["recall_plan"].clear()
    jaxmem.jit(step, budget(), **options)(copied(PARAMS), BATCH)
    assert keys["recall_plan"] == keys["remember_plan"]


def test_other_shapes_are_planned_and_known_afterwards(planned, monkeypatch):
    half = BATCH[: len(BATCH) // 2]
    assert_equal(planned(copied(PARAMS), half), jax.jit(step)(PARAMS, half))
    of_half = planned.plan
    no_search(monkeypatch)
    planned(copied(PARAMS), BATCH)
    assert planned.plan is not of_half
    assert planned.plan.fingerprint != of_half.fingerprint
    planned(copied(PARAMS), half)
    assert planned.plan is of_half


def test_a_call_of_another_thread_in_between(planned, monkeypatch):
    """A call runs the program of its shapes, although another thread calls the step meanwhile."""
    half = BATCH[: len(BATCH) // 2]
    want = planned(copied(PARAMS), half)
    planned(copied(PARAMS), BATCH)
    others = iter([lambda: planned(copied(PARAMS), half)])

    def after_another_call(arguments):
        for call in others:
            call()
        return needs_no_executable(arguments)

    monkeypatch.setattr(jit, "needs_no_executable", after_another_call)
    assert_equal(planned(copied(PARAMS), half), want)
    assert next(others, None) is None


def test_an_executables_own_error_is_raised(planned, monkeypatch):
    """An error that shapes do not explain is the user's to see, and nothing is planned for it."""
    planned(copied(PARAMS), BATCH)
    latest, *call = planned._last
    fails = failing(latest, ValueError("of the executable"))
    monkeypatch.setattr(planned, "_last", (fails, *call))
    with pytest.raises(ValueError, match="of the executable"):
        planned(copied(PARAMS), BATCH)


def test_keywords_and_static_arguments(monkeypatch):
    options = {"static_argnames": "power", "donate_argnames": "params"}
    made = jaxmem.jit(step, actions=jaxmem.plans.LOSSLESS, **options)
    for power in (1, 2):
        got = made(copied(PARAMS), batch=BATCH, rate=0.2, power=power)
        assert_equal(got, expected(0.2, power))
    assert len(made._known) == 2
    monkeypatch.setattr(made, "_made", lambda *_: pytest.fail("planned again"))
    assert_equal(made(copied(PARAMS), batch=BATCH, rate=0.3, power=1), expected(0.3))


def test_a_static_argument_by_its_number_is_found_by_its_name_too():
    powers = lambda n, params: step(params, BATCH, power=n)
    options = {"static_argnums": 0, "donate_argnums": 1}
    made = jaxmem.jit(powers, actions=jaxmem.plans.LOSSLESS, **options)
    for call in (made(2, copied(PARAMS)), made(n=2, params=copied(PARAMS))):
        assert_equal(call, expected(power=2))


def test_a_copy_of_a_trainer_has_the_same_step(planned):
    assert copy.deepcopy({"step": planned})["step"] is planned


def test_values_that_are_not_numbers_are_found_as_under_jit():
    def logs(params, batch):
        loss, gradients = jax.value_and_grad(LOSS)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), jnp.log(loss - 2 * loss)

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jaxmem.jit(logs, "1GiB", donate_argnums=0)(copied(PARAMS), BATCH)


def test_a_lowered_step_has_a_plan():
    made = jaxmem.jit(step, "1GiB", donate_argnums=0)
    made.lower(PARAMS, BATCH)
    assert made.plan.compiled_bytes


def test_as_a_decorator_and_as_a_method():
    class Trainer:
        rate = 0.3

        @jaxmem.jit(static_argnums=0, donate_argnums=1)
        def train(self, params, batch):
            return step(params, batch, self.rate)

    trainer = Trainer()
    assert_equal(trainer.train(copied(PARAMS), BATCH), expected(0.3))
    assert trainer.train.plan is Trainer.train.plan


@pytest.mark.parametrize("named", [False, True])
def test_a_jitted_step_keeps_its_donation(named):
    options = {"donate_argnames": "params"} if named else {"donate_argnums": 0}
    made = jaxmem.jit(jax.jit(step, **options), budget(), actions=jaxmem.plans.LOSSLESS)
    for _ in range(2):
        params = copied(PARAMS)
        got = made(params=params, batch=BATCH) if named else made(params, BATCH)
        assert_equal(got, expected())
        assert params["embedding"].is_deleted()
    assert made.plan.compiled_bytes <= budget()


def test_trace_lower_and_explain(planned):
    planned(copied(PARAMS), BATCH)
    assert "differentiated=True" in str(planned.trace(PARAMS, BATCH).jaxpr)
    assert "stablehlo" in planned.lower(PARAMS, BATCH).as_text()
    explained = planned.explain()
    assert explained.total_bytes == planned.plan.compiled_bytes


def test_inside_another_function_it_is_planned_for_the_shapes_there():
    """As where a library jits the step that it is given."""
    made = jaxmem.jit(step, budget(), actions=jaxmem.plans.LOSSLESS, donate_argnums=0)
    library = jax.jit(lambda params, batch: made(params, batch), donate_argnums=0)
    assert_equal(library(copied(PARAMS), BATCH), expected())
    assert made.plan.compiled_bytes <= budget()
    assert not made.plan.keeps_everything
    assert blocks_in(lambda *args: made(*args), PARAMS, BATCH)
    assert compiled_bytes(lambda *args: made(*args)) <= budget()


def test_inside_a_function_for_several_devices_it_runs_as_it_is():
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    told = pytest.warns(JaxmemWarning, match="before it has a plan")
    with jax.sharding.use_abstract_mesh(mesh), told:
        jax.eval_shape(jaxmem.jit(step, budget()), PARAMS, BATCH)


@functools.cache
def equinox_train(scanned: bool):
    """A step of an Equinox module with functions and numbers, its arguments, and what it returns
    under Equinox's own jit.
    """
    model, batch = EquinoxModel(SMALL, scanned, jax.random.key(0)), tokens(SMALL)
    model = eqx.combine(perturbed(eqx.filter(model, eqx.is_array)), model)
    rest = batch, jax.random.key(1)
    assert not all(map(eqx.is_array, jax.tree.leaves(model))), "functions and numbers, too"

    def loss(model, batch, key):
        logits = jax.vmap(model)(batch[:, :-1], jax.random.split(key, len(batch)))
        return cross_entropy(logits, batch[:, 1:])

    def train(model, *rest):
        value, gradients = eqx.filter_value_and_grad(loss)(model, *rest)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), value

    return train, model, rest, eqx.filter_jit(train)(model, *rest)


def assert_updated(got, want):
    assert_equal(eqx.filter(got[0], eqx.is_array), eqx.filter(want[0], eqx.is_array), 1e-6)
    assert float(got[1]) == pytest.approx(float(want[1]))


@pytest.mark.quick("True")
@pytest.mark.parametrize("scanned", [True, False])
def test_equinox_modules(scanned):
    train, model, rest, want = equinox_train(scanned)
    made = jaxmem.jit(train, "1GiB", donate_argnums=0)
    arrays, other = eqx.partition(model, eqx.is_array)
    got, value = made(eqx.combine(copied(arrays), other), *rest)
    assert_updated((got, value), want)
    assert made.plan.compiled_bytes
    made(got, *rest)
    assert len(made._known) == 1


@pytest.mark.filterwarnings("ignore:plan. the step replaces")  # it donates nothing
def test_a_step_of_filter_jit_without_donation_is_planned():
    train, model, rest, want = equinox_train(True)
    jitted = eqx.filter_jit(train)
    assert_updated(jitted(model, *rest), want)  # what filter_jit traced before is no plan's
    whole = nbytes(jitted.lower(model, *rest).compile().compiled)
    made = jaxmem.jit(jitted, int(0.9 * whole))
    assert_updated(made(model, *rest), want)
    assert made.plan.compiled_bytes <= made.plan.budget_bytes < whole


@pytest.mark.parametrize("donate", ["all", "all-except-first", "warn", "warn-except-first"])
def test_a_step_of_filter_jit_that_donates_is_refused(donate):
    with pytest.raises(StepError, match="donation, which is lost inside another jit.*argnums=0"):
        jaxmem.jit(eqx.filter_jit(step, donate=donate))


@pytest.mark.parametrize(
    ("wrong", "meant"), [("donate_argnum", "donate_argnums"), ("budgt", "budget")]
)
def test_a_misspelt_option_is_refused_with_the_option_that_was_meant(wrong, meant):
    with pytest.raises(StepError, match=f"`{wrong}`.*`{meant}`"):
        jaxmem.jit(step, **{wrong: 0})


def test_options_of_nnx_jit_are_known():
    for name in {*inspect.signature(nnx.jit).parameters} - {"fun"}:
        jaxmem.jit(nnx_train, **{name: None})


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 4 * width, rngs=rngs, param_dtype=jnp.float64)
        self.down = nnx.Linear(4 * width, width, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
    def __init__(self, width: int, layers: int, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.calls = nnx.Variable(jnp.zeros((), int))

    def __call__(self, x):
        self.calls[...] += 1
        for block in self.blocks:
            x = block(x)
        return x


def nnx_train(model, x):
    loss, gradients = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients))
    return loss


@pytest.fixture
def twins():
    """Two equal models, and an input."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 32)))
    return Model(32, 4, nnx.Rngs(0)), Model(32, 4, nnx.Rngs(0)), x


@pytest.mark.parametrize("jit_of_a_library", [False, True])
def test_nnx_modules_are_updated(jit_of_a_library, twins):
    ours, theirs, x = twins
    made, jitted = jaxmem.jit(nnx_train, "1GiB", donate_argnums=0), nnx.jit(nnx_train)
    called = nnx.jit(lambda *args: made(*args)) if jit_of_a_library else made
    for _ in range(3):
        assert float(called(ours, x)) == pytest.approx(float(jitted(theirs, x)), rel=1e-12)
    assert_equal(nnx.state(ours), nnx.state(theirs))
    assert ours.calls[...] == 3
    assert made.plan.compiled_bytes
    assert len(made._known) == 1


@pytest.mark.parametrize("named", [False, True])
def test_a_step_of_nnx_jit_keeps_its_donation(named, twins):
    options = {"donate_argnames": "model"} if named else {"donate_argnums": 0}
    ours, theirs, x = twins
    made, jitted = jaxmem.jit(nnx.jit(nnx_train, **options), "1GiB"), nnx.jit(nnx_train)
    for _ in range(2):
        before = jax.tree.leaves(nnx.state(ours, nnx.Param))
        value = made(model=ours, x=x) if named else made(ours, x)
        assert float(value) == pytest.approx(float(jitted(theirs, x)), rel=1e-12)
        assert all(array.is_deleted() for array in before)
    assert_equal(nnx.state(ours), nnx.state(theirs))


def test_a_step_without_layers_runs_as_it_is_if_it_fits():
    def regression(w, x):
        return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

    w, x = jnp.ones(3), jnp.ones((5, 3))
    made = jaxmem.jit(regression)
    with pytest.warns(JaxmemWarning, match="runs as it is, and is not planned"):
        assert_equal(made(w, x), regression(w, x))
    with pytest.raises(StepError, match="no layer"):
        _ = made.plan
    with pytest.raises(BudgetError, match="cannot be planned"):
        jaxmem.jit(regression, 10)(w, x)


@pytest.mark.parametrize("options", [{"static_argnums": 2}, {"static_argnames": "power"}], ids=str)
def test_static_arguments_of_a_jitted_step_are_refused(options, twins):
    """Only the step's own jit knows which arguments are static."""
    model, _, x = twins
    train = lambda model, x, power: nnx_train(model, x**power)
    with pytest.raises(StepError, match="static arguments"):
        jaxmem.jit(nnx.jit(train, donate_argnums=0, **options))(model, x, 2)
    jitted = jax.jit(step, static_argnames="power", donate_argnums=0)
    with pytest.raises(StepError, match="static arguments"):
        jaxmem.jit(jitted)(copied(PARAMS), BATCH, power=2)


class OutOfMemory(Exception):
    """Stands for JAX's error, which only its runtime makes."""


def test_a_step_that_runs_out_of_memory_is_planned_for_less(monkeypatch, planned):
    monkeypatch.setattr(jax.errors, "JaxRuntimeError", OutOfMemory)
    made = jaxmem.jit(step, int(1.2 * budget()), actions=jaxmem.plans.LOSSLESS)
    warnings.filterwarnings("ignore", "plan: the step replaces")  # it donates nothing
    make, most = made._made, []

    def limited(args, kwargs, changed):
        """A device with memory for 95 % of the first plan."""
        found = make(args, kwargs, changed)
        most.append(0.95 * found.plan.compiled_bytes)

        def run(*values):
            if found.plan.compiled_bytes > most[0]:
                raise OutOfMemory("RESOURCE_EXHAUSTED: Out of memory")
            return found.run(*values)

        return Compilation(found.build, found.plan, run, found.shapes)

    monkeypatch.setattr(made, "_made", limited)
    with pytest.warns(JaxmemWarning, match="ran out of memory"):
        assert_equal(made(PARAMS, BATCH), expected())
    assert made.plan.compiled_bytes <= most[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(PARAMS, BATCH)
    no_search(monkeypatch)
    later = jaxmem.jit(step, int(1.2 * budget()), actions=jaxmem.plans.LOSSLESS)
    later(PARAMS, BATCH)
    assert later.plan.compiled_bytes <= most[0], "a later process starts with the smaller plan"


def test_the_first_run_is_watched_though_the_step_was_planned_before(monkeypatch, planned):
    """`lower` plans the step, and its first run may run out of memory all the same."""
    monkeypatch.setattr(jax.errors, "JaxRuntimeError", OutOfMemory)
    made = jaxmem.jit(step, "1GiB", actions=jaxmem.plans.LOSSLESS, donate_argnums=0)
    made.lower(PARAMS, BATCH)
    ((key, found),) = made._known.items()
    made._known[key] = failing(found, OutOfMemory("RESOURCE_EXHAUSTED: Out of memory"))
    with pytest.warns(JaxmemWarning, match="ran out of memory"):
        assert_equal(made(copied(PARAMS), BATCH), expected())


@refused(
    StepError,
    (lambda: jaxmem.jit(3), "`step` is int"),
    (lambda: jaxmem.jit(step, target="h200"), "`target`"),
    (lambda: jaxmem.jit(jax.jit(step), donate_argnums=0), "`donate_argnums`"),
    (lambda: jaxmem.jit(step).plan, "before its first call"),
    (lambda: jaxmem.jit(step).explain(), "before its first call"),
    (lambda: jaxmem.jit(step, static_argnums=1)(PARAMS, [1]), "cannot be hashed: .*'list'"),
)
def test_wrong_arguments(wrong):
    wrong()


def test_a_budget_that_no_plan_meets():
    with pytest.raises(BudgetError) as error:
        jaxmem.jit(step, budget() // 50)(PARAMS, BATCH)
    assert error.value.least_bytes > budget() // 50


def test_one_line_says_what_was_decided(capsys, planned, monkeypatch):
    """Outside of a terminal nothing else is written."""
    monkeypatch.setattr("jaxmem._core.progress.LOG.hasHandlers", lambda: False)
    again = jaxmem.jit(step, budget(), actions=jaxmem.plans.LOSSLESS, donate_argnums=0)
    again(copied(PARAMS), BATCH)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    plan = again.plan
    for size in (plan.compiled_bytes, plan.budget_bytes, plan.baseline_bytes):
        assert show_bytes(size) in lines[0]
    chosen = [choice.action.value for tags in plan.actions.values() for choice in tags.values()]
    for action in {*chosen}:
        assert f"{chosen.count(action)} {action}" in lines[0]
    longer, doubt = plan.predicted_seconds - plan.baseline_seconds, plan.uncertain_seconds
    assert ("as far as times are known" in lines[0]) == (abs(longer) <= 1.001 * doubt)


def test_auto_plans_the_function_for_other_devices(planned):
    """The step under `jaxmem.jit` is no plan's: another plan of it is its own."""
    build = jaxmem.auto(planned)
    assert blocks_in(build(None), PARAMS, BATCH) == 0
    plan = jaxmem.verify(planned.plan, build, PARAMS, BATCH)
    assert plan.compiled_bytes == planned.plan.compiled_bytes

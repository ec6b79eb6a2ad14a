"""Training steps in the shape of libraries that no package index has, under `jaxmem.jit` in the
place of the library's jit: plans within their budgets, and the library's own loss and gradients.
"""

import functools

import jax
import pytest

import jaxmem
from benchmarks.stacks import positional
from examples.stacks.training import Training, farthest, nbytes, observed
from jaxmem.plans import LOSSLESS, Assignment
from tests.shared.shapes.table import SHAPES

# Tunix does not donate the model, and its step returns all of it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:plan. the step replaces:jaxmem.errors.JaxmemWarning"
)
# Their programs are small, since a scan holds their layers once.
PLANNED = ("AXLearn", "simply")
# jaxlib before 0.11.1 undoes the checkpoints of layers in a Python loop on a CPU.
ON_A_CPU = [n for n, s in SHAPES.items() if s.in_a_scan or jax.__version_info__ >= (0, 11, 1)]
SHARES = (0.25, 0.5, 0.75)  # of the range from full recomputation to everything kept


def training(name: str, **options) -> Training:
    """The step as the library makes it by default."""
    shape = SHAPES[name]
    return shape.make(next(iter(shape.policies.values())), **options)


def under(name: str, plan: Assignment) -> Training:
    """The step with this assignment for each of its layers."""
    planned = lambda step, **options: SHAPES[name].jit(jaxmem.auto(step, plan), **options)
    return training(name, jit=planned)


@functools.cache
def range_of(name: str) -> tuple[int, int]:
    """Bytes of full recomputation, and of everything kept."""
    both = Assignment.nothing(), Assignment.everything()
    least, most = (nbytes(under(name, plan)) for plan in both)
    return least, most


@functools.cache
def own(name: str) -> tuple[float, list]:
    return observed(training(name))


@pytest.fixture(autouse=True)
def no_mesh():
    """A shape may set a mesh."""
    yield
    if jax.sharding.get_abstract_mesh().axis_names:
        jax.set_mesh(None)


def compare(name: str, training: Training) -> None:
    """Loss and gradients are those of the step under the library's own jit."""
    loss, moved = observed(training)
    assert loss == pytest.approx(own(name)[0], rel=1e-6)
    assert farthest(moved, own(name)[1]) < 1e-5


def check(name: str, share: float) -> None:
    least, most = range_of(name)
    budget = int(least + share * (most - least))
    planned = training(name, jit=functools.partial(jaxmem.jit, budget=budget, actions=LOSSLESS))
    compare(name, planned)
    assert planned.step.plan.compiled_bytes <= budget


@pytest.mark.core
@pytest.mark.parametrize("name", PLANNED)
def test_one_changed_line(name):
    check(name, 0.5)


@pytest.mark.quick(
    "big_vision", "accumulation", "local and global attention", "grug", "Kauldron", "openpi"
)  # fmt: skip
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in PLANNED])
def test_gradients_under_full_recomputation(name):
    compare(name, under(name, Assignment.nothing()))


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ON_A_CPU)
def test_three_budgets(name, share):
    check(name, share)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "v5e"])
@pytest.mark.parametrize("name", SHAPES)
def test_plans_for_absent_devices(name, target):
    """Half of the bytes between the arguments and everything kept are enough."""
    build, args = positional(training(name))
    whole = jaxmem.plan(build, *args, target=target, actions=LOSSLESS)
    held = whole.baseline_parts.arguments
    budget = int(held + 0.6 * (whole.baseline_bytes - held))
    plan = jaxmem.plan(build, *args, target=target, budget=budget, actions=LOSSLESS)
    assert plan.compiled_bytes <= budget < whole.baseline_bytes

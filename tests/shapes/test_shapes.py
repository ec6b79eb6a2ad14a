"""Training steps in the shape of libraries that no package index has, under `jaxmem.jit` in the
place of the library's jit: plans within their budgets, and the library's own loss and gradients.
"""

import functools
from collections.abc import Callable

import jax
import pytest
from flax import nnx

import jaxmem
from examples.stacks import openpi_shape
from examples.stacks.training import Training, farthest, nbytes, observed
from jaxmem.plans import LOSSLESS, Assignment
from tests.shared.shapes import axlearn, by_name, grug, loops, trainers

pytestmark = [
    pytest.mark.jax_defaults,
    # Tunix does not donate the model, and its step returns all of it.
    pytest.mark.filterwarnings("ignore:plan. the step replaces:jaxmem.errors.JaxmemWarning"),
]
LORA = openpi_shape.Config(
    language=openpi_shape.Expert(rank=2), action=openpi_shape.Expert(24, mlp=48, rank=2)
)
SHAPES: dict[str, Callable[..., Training]] = {
    "a step of a method, AXLearn": axlearn.training,
    "policies by name, big_vision": by_name.big_vision,
    "policies by name, simply": by_name.simply,
    "an explicit mesh, grug": grug.training,
    "a conditional update, Tunix": trainers.tunix,
    "a static object, Kauldron": trainers.kauldron,
    "a train state, Linen": trainers.linen,
    "accumulation": loops.accumulated,
    "nested scans": loops.local_and_global,
    "Linen in NNX, openpi": openpi_shape.training,
    "Linen in NNX with LoRA, openpi": functools.partial(openpi_shape.training, config=LORA),
}
# Their programs are small, since a scan holds their layers once.
PLANNED = ("a step of a method, AXLearn", "policies by name, simply")
SHARES = (0.25, 0.5, 0.75)  # of the range from full recomputation to everything kept


def jit_of(name: str) -> Callable:
    return nnx.jit if "Tunix" in name else jax.jit


def under(name: str, plan: Assignment) -> Training:
    """The step with this assignment for each of its layers."""
    planned = lambda step, **options: jit_of(name)(jaxmem.auto(step, plan), **options)
    return SHAPES[name](jit=planned)


@functools.cache
def range_of(name: str) -> tuple[int, int]:
    """Bytes of full recomputation, and of everything kept."""
    both = Assignment.nothing(), Assignment.everything()
    least, most = (nbytes(under(name, plan)) for plan in both)
    return least, most


@functools.cache
def own(name: str) -> tuple[float, list]:
    return observed(SHAPES[name]())


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
    planned = SHAPES[name](jit=functools.partial(jaxmem.jit, budget=budget, actions=LOSSLESS))
    compare(name, planned)
    assert planned.step.plan.compiled_bytes <= budget


@pytest.mark.core
@pytest.mark.parametrize("name", PLANNED)
def test_one_changed_line(name):
    check(name, 0.5)


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in PLANNED])
def test_gradients_under_full_recomputation(name):
    compare(name, under(name, Assignment.nothing()))


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", SHAPES)
def test_three_budgets(name, share):
    check(name, share)

"""How the liveness estimate divides values over a mesh: as XLA divides them, on eight CPU devices
and for GPUs that are absent.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem._trace.liveness.division import MeshDivision, divide
from jaxmem._trace.rewrite import flatten
from tests.shared import children

MESH = AbstractMesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def on_eight_devices() -> dict:
    return children.printed(children.with_cpus(8), "tests.programs.divided_values")


def test_results_are_divided_as_xla_divides_them(on_eight_devices):
    parts = on_eight_devices["parts"]
    assert parts.keys() == {"mlp", "attention", "lookup", "gradient", "loop"}
    for name, results in parts.items():
        for by_xla, by_estimate in results:
            assert by_estimate == by_xla, name
    assert {by_xla for results in parts.values() for by_xla, _ in results} == {4, 8}


@pytest.mark.parametrize("step", ["data", "all"])
def test_bytes_of_a_divided_step_are_near_the_compiled_bytes(on_eight_devices, step):
    """Gradients of a data-parallel step are whole on each device: an eighth of them is far off."""
    found = on_eight_devices["bytes"][step]
    assert found["told"] == pytest.approx(found["compiled"], rel=0.2)
    assert found["scalar"] < 0.75 * found["compiled"]


def divided(function, *args) -> tuple[MeshDivision, list]:
    """The division of a function's values; arguments are shapes and specs."""
    flat = flatten(jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape, _ in args)))
    shardings = [NamedSharding(MESH, spec) for _, spec in args]
    division = divide(flat, shardings, flatten)
    assert division is not None
    return division, [division.specs[v] for v in flat.outputs if isinstance(v, int)]


def axes(*named: str) -> tuple[frozenset[str], ...]:
    """A spec, of the axes of each dimension with spaces between."""
    return tuple(frozenset(one.split()) for one in named)


def test_a_fully_sharded_weight_is_whole_in_its_product():
    x, w = ((8, 32), P("fsdp", None)), ((32, 64), P("fsdp", "tensor"))
    division, (made,) = divided(lambda x, w: jnp.sin(x) @ w, x, w)
    assert made == axes("fsdp", "tensor")
    assert division.weights == 8 * 32 * 64 // 2, "whole along fsdp, a half along tensor"
    # gathered along its second dimension, the stack is copied to another order
    assert not division.relaid
    turned = ((32, 64), P("tensor", "fsdp"))
    division, _ = divided(lambda x, w: x @ w, ((8, 32), P("fsdp", "tensor")), turned)
    assert len(division.relaid) == 1


def test_a_gradient_is_whole_before_it_is_scattered():
    x, g = ((8, 32), P("fsdp", None)), ((8, 64), P("fsdp", "tensor"))
    p = (32, 64), P("fsdp", "tensor")
    division, (made,) = divided(lambda p, x, g: p - jnp.sin(x).T @ g, p, x, g)
    assert made == axes("fsdp", "tensor")
    ((_, whole),) = (one for several in division.gathered.values() for one in several)
    assert whole == 8 * 32 * 64 // 2


def test_a_constraint_decides_before_a_product_does():
    """With sequence parallelism, rows and features both ask for the axis."""
    x, w = ((8, 16, 32), P("fsdp", "tensor", None)), ((32, 64), P("fsdp", "tensor"))
    features = NamedSharding(MESH, P("fsdp", None, "tensor"))
    free = lambda x, w: jnp.sin(x) @ w
    bound = lambda x, w: jax.lax.with_sharding_constraint(jnp.sin(x) @ w, features)
    assert divided(free, x, w)[1] == [axes("fsdp", "tensor", "")]
    division, made = divided(bound, x, w)
    assert made == [axes("fsdp", "", "tensor")]
    ((_, whole),) = (one for several in division.gathered.values() for one in several)
    assert whole == 8 * 8 * 16 * 32 // 4, "activations, not the weight"


def test_loops_and_branches_divide_what_they_carry():
    x, w = ((8, 32), P("fsdp", None)), ((3, 32, 32), P(None, "fsdp", "tensor"))

    def loop(x, w):
        layer = lambda x, w: (jnp.tanh(x @ w), x.sum(-1))
        x, sums = jax.lax.scan(layer, x, w)
        chosen = jax.lax.cond(sums.sum() > 0, jnp.sin, lambda x: x * 2, x)
        return chosen, sums, jnp.zeros_like(w) + w

    division, made = divided(loop, x, w)
    assert made[0][0] == frozenset({"fsdp"})
    assert made[1] == axes("", "fsdp")
    assert made[2] == axes("", "fsdp", "tensor")
    assert any(inside.weights for bodies in division.inside.values() for inside in bodies)


@pytest.mark.parametrize(
    ("function", "shape", "spec", "want"),
    [
        (lambda x: x.reshape(8, 4, 8), (8, 32), P("fsdp", "tensor"), ("fsdp", "tensor", "")),
        (lambda x: x.reshape(32, 8), (8, 4, 8), P("fsdp", "tensor"), ("fsdp", "")),
        (lambda x: x.T, (8, 32), P("fsdp", "tensor"), ("tensor", "fsdp")),
        (lambda x: x.sum(0), (8, 32), P("fsdp", "tensor"), ("tensor",)),
        (lambda x: x[None] + 1, (8, 32), P("fsdp", None), ("", "fsdp", "")),
        (lambda x: x[:, :5], (8, 32), P("fsdp", "tensor"), ("fsdp", "")),
        (lambda x: jnp.concatenate([x, x], 1), (8, 32), P("fsdp", "tensor"), ("fsdp", "")),
        (lambda x: jnp.cumsum(x, 1), (8, 32), P("fsdp", None), ("fsdp", "")),
    ],
)
def test_operations_keep_the_division_of_their_dimensions(function, shape, spec, want):
    assert divided(function, (shape, spec))[1] == [axes(*want)]


def test_nothing_is_divided_without_a_known_sharding():
    flat = flatten(jax.make_jaxpr(jnp.sin)(jnp.zeros((8, 8))))
    assert divide(flat, [None], flatten) is None
    assert divide(flat, [NamedSharding(MESH, P())], flatten) is None

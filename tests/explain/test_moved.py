"""What a step moves to host memory and back, under the names that its user knows."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxmem._core.actions import OFFLOAD, RECOMPUTE
from jaxmem._planner.explain.explain import explain
from jaxmem._planner.explain.moved import ROWS, moved
from jaxmem._planner.explain.names import Arguments, Saved
from jaxmem._target.hlo.transfers import Transfer
from tests.explain.test_explain import STEP, UP_BYTES, plan_of

pytestmark = pytest.mark.jax_defaults


def transfer(argument, nbytes, runs=1, to_host=False, how="dma", in_loop=True, products=0, op=""):
    return Transfer("copy", op, to_host, how, nbytes, runs, in_loop, products, argument)


def arguments(state) -> Arguments:
    traced: Any = jax.jit(lambda state: state).trace(state)
    return Arguments(traced, (state,))


def offloaded(name, nbytes) -> Saved:
    return Saved(name, nbytes, 3, True, "f32", host=True)


@pytest.mark.core
def test_few_arguments_stand_under_their_paths():
    found = [
        transfer("args[0]", 8, runs=3, products=2),
        transfer("args[0]", 8, how="kernel", in_loop=False),
        transfer("args[1]", 4, runs=5),
        transfer("args[1]", 4, runs=5, to_host=True),
    ]
    told = moved(found, arguments({"a": jnp.ones(2), "b": jnp.ones(3)}), ())
    assert [(m.name, m.to_host, m.how, m.in_loop, m.bytes, m.beside, m.count) for m in told] == [
        ("state['a']", False, "dma", True, 24, 24, 1),
        ("state['b']", False, "dma", True, 20, 0, 1),
        ("state['a']", False, "kernel", False, 8, 0, 1),
        ("state['b']", True, "dma", True, 20, 0, 1),
    ]


@pytest.mark.core
def test_many_arguments_stand_under_what_their_paths_share():
    layers = {f"w{i}": {"kernel": jnp.ones(2), "bias": jnp.ones(2)} for i in range(6)}
    state = {"mu": layers, "nu": layers}
    count = len(jax.tree.leaves(state))
    names = arguments(state)
    one = [transfer(f"args[{i}]", 8, products=i) for i in range(count)]
    told = moved(one, names, ())
    assert [(m.name, m.bytes, m.beside, m.count) for m in told] == [
        # Leaves would be 24 rows, so that a kernel and its bias are one.
        *((f"state['mu']['w{i}']", 16, 8 if i == 0 else 16, 2) for i in range(6)),
        *((f"state['nu']['w{i}']", 16, 16, 2) for i in range(6)),
    ]
    both = [*one, *(transfer(f"args[{i}]", 8, to_host=True) for i in range(count))]
    told = moved(both, names, ())
    assert len(told) <= ROWS
    assert {(m.name, m.to_host): m.bytes for m in told} == {
        ("state['mu']", False): 96, ("state['nu']", False): 96,
        ("state['mu']", True): 96, ("state['nu']", True): 96,
    }  # fmt: skip


@pytest.mark.core
def test_what_is_no_argument_is_named_by_tags_of_its_bytes_else_by_its_operation():
    saved = [offloaded("up", 64), offloaded("act", 64), offloaded("ln", 16)]
    found = [
        transfer("", 64, op="jit(step)/while/body/dynamic_slice"),
        transfer("", 16, to_host=True),
        transfer("", 32, op="jit(step)/device_put"),
        transfer("", 8),
    ]
    names = {m.name for m in moved(found, arguments({"a": jnp.ones(2)}), saved)}
    assert names == {"offloaded: up or act", "offloaded: ln", "device_put", "unnamed"}


def test_an_offloaded_tag_is_told_for_a_gpu_that_is_not_there():
    found = explain(*STEP, plan=plan_of(STEP, {"up": OFFLOAD, "act": RECOMPUTE}), target="h200")
    assert {(m.name, m.to_host): m.bytes for m in found.transfers} == {
        ("offloaded: up", False): UP_BYTES,
        ("offloaded: up", True): UP_BYTES,
    }
    assert {m.in_loop for m in found.transfers} == {True}
    assert "moved in a step" in str(found)
    assert explain(*STEP, target="h200").transfers == ()

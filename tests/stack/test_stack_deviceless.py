"""The stack for a GPU that is not there: what its loops copy to the host and back, and what they
hold.
"""

import functools
import re
from importlib.metadata import version

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._core.groups import ranges
from jaxmem._target.buffers.peak import peak
from jaxmem._target.compiled.dumped import compile_dumped
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._target.deviceless.process import child_environment
from jaxmem._trace.export import export_flat
from tests.programs.offloaded_stack import BATCH, LAYERS, SEQUENCE, WIDTH
from tests.shared import children, models

OFFLOADS = tuple(int(p) for p in version("jaxlib").split(".")[:3]) >= (0, 11, 1)


def offloading(test):
    """A test for jaxlib >= 0.11.1 alone: older ones read a scan's offloaded tensors wrongly, and
    are refused.
    """
    return test if OFFLOADS else None


@functools.cache
def offloaded() -> str:
    environment = child_environment(children.finding_packages())
    return children.printed(environment, "tests.programs.offloaded_stack")


def folding_step(plan):
    """step(moments, params, x) -> new moments, each layer's gradient added to them."""

    def loss(moments, params, x):
        fold = lambda m, g: jax.tree.map(jnp.add, m, g[0])
        layer = lambda p, x: models.block(x, *p)
        numbers = jnp.arange(LAYERS, dtype=jnp.float32)
        y = jaxmem.stack(layer, (params, numbers), x, plan=plan, moments=moments, fold=fold)
        return (y * y).mean()

    return jax.grad(loss)


def plain_step(plan):
    """step(params, x) -> new params, by their gradient."""

    def loss(params, x):
        numbers = jnp.arange(len(params["a"]), dtype=jnp.float32)
        y = jaxmem.stack(lambda p, x: models.block(x, *p), (params, numbers), x, plan=plan)
        return (y * y).mean()

    return lambda params, x: jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))


def stacks_of_parameters(step, *args, compiler: Compiler | None) -> list[str]:
    """Kinds of the buffers at the peak that have a stacked parameter's shape."""
    shapes = {a.shape for a in jax.tree.leaves(models.parameters(LAYERS, WIDTH))}
    jitted = jax.jit(step, donate_argnums=0)
    if compiler is None:
        _, dumped = compile_dumped(jitted.lower(*args))
        held = peak(dumped).held
    else:
        exported, donated = export_flat(jitted.trace(*args), "cuda")
        held = compiler.explain(exported, donated=donated)[1].held
    return sorted(h.kind for h in held if h.shape in shapes)


@pytest.mark.jax_defaults
@pytest.mark.parametrize(
    ("action", "target"),
    [("keep", "local"), ("recompute", "local"), (None, "local"), ("recompute", "h200")],
)
def test_no_loop_holds_a_copy_of_the_parameters(action, target, request):
    compiler = None if target == "local" else request.getfixturevalue(target)
    plan = None if action is None else models.draft(action)
    params, x = models.shapes(LAYERS, WIDTH, BATCH, SEQUENCE)
    folded = stacks_of_parameters(folding_step(plan), params, params, x, compiler=compiler)
    assert folded == ["argument"] * 6
    gradients = stacks_of_parameters(plain_step(plan), params, x, compiler=compiler)
    assert gradients.count("argument") == 3
    assert gradients.count("temporary") <= 3, "the gradient, once"


def loops(hlo: str) -> list[list[str]]:
    """Lines of the computations that copy from or to the host: the forward loop's body, then the
    backward's.
    """
    bodies = re.split(r"\n(?=\S[^\n]*\{\n)", hlo)
    return [b.splitlines() for b in bodies if re.search(r"dynamic-(update-)?slice-start\S* =", b)]


def pairs(body: list[str]):
    """(start line, done line) of each asynchronous copy."""
    starts = {
        m[1]: i
        for i, line in enumerate(body)
        if (m := re.match(r"\s*%(\S+-start\S*) = .*S\(5\)", line))
    }
    for i, line in enumerate(body):
        if (m := re.match(r"\s*%\S+-done\S* = .*?-done\(%(\S+?)\)", line)) and m[1] in starts:
            yield starts[m[1]], i


@offloading
def test_a_layers_copies_run_beside_its_compute():
    forward, backward = loops(offloaded())
    for body, least in ((forward, 4), (backward, 5)):
        copies = list(pairs(body))
        assert len(copies) == len(models.TAGS), "one a tag"
        computes = lambda lines: any(
            re.search(r"gemm_fusion|__cublas|kind=kCustom|kind=kInput", line) for line in lines
        )
        assert sum(computes(body[start:done]) for start, done in copies) >= least


@offloading
def test_the_backward_loop_reads_layers_from_the_last_to_the_first():
    found = {"dynamic-slice": [], "dynamic-update-slice": []}
    slices = (
        r"ROOT \S+ = (\S+?)\{[^ ]*\} (dynamic-slice|dynamic-update-slice)\(.*"
        r"\"byte_offset\":\"(\d+)\",\"byte_stride\":\"(-?\d+)\""
    )
    for block in re.split(r"\n(?=\S[^\n]*\{\n)", offloaded()):
        if "S(5)" in block and (m := re.search(slices, block)):
            found[m[2]].append((int(m[3]), int(m[4])))
    assert len(found["dynamic-slice"]) == len(models.TAGS)
    for offset, stride in found["dynamic-slice"]:
        assert stride < 0
        assert offset == (LAYERS - 1) * -stride
    assert found["dynamic-update-slice"]
    assert all(offset == 0 < stride for offset, stride in found["dynamic-update-slice"])
    sizes = sorted(stride for _, stride in found["dynamic-update-slice"])
    assert sizes == sorted(-stride for _, stride in found["dynamic-slice"])


@pytest.mark.jax_defaults
@pytest.mark.slow
def test_a_plan_for_another_gpu_decides_groups_of_layers():
    args = models.shapes(12, 256, 8, 256)
    plan = jaxmem.plan(
        plain_step, *args, budget="120MiB", target="h200", actions=("keep", "recompute")
    )
    first, last = sorted(plan.actions, key=lambda label: ranges([label], "block"))
    assert ranges([first, last], "block") in [((0, n), (n, 12)) for n in range(1, 12)]
    assert plan.actions[first] != plan.actions[last]
    assert 0.93 * 120 * 2**20 < plan.compiled_bytes <= 120 * 2**20
    assert plan.predicted_bytes == pytest.approx(plan.compiled_bytes, rel=0.01)
    assert jaxmem.verify(plan, plain_step, *args).compiled_bytes == plan.compiled_bytes

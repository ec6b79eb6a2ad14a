"""Explicit axes: the types inside a GPT's or a Llama's training step show how devices divide each
array, and losses equal the losses with automatic axes.
"""

import jax
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import AxisType

from experiments.command.load import load
from experiments.models import registry as models
from experiments.models import sharding
from experiments.steps.step import abstract, make_step
from tests.shared import children

pytestmark = pytest.mark.jax_defaults
MICRO = (
    "model.layers=2 model.width=16 model.heads=2 train.sequence=16 train.loss_chunk=8 train.steps=8"
    " optimizer.warmup=2"
)
MESH = "mesh.fsdp=2 mesh.tensor=2"
WAYS = [
    "",
    "mesh.sequence=true",
    "train.microbatches=2",
    "model.attention=fused train.microbatches=2 optimizer.accumulation=multi_steps",
    "model.vocab=257",  # which "tensor" does not divide
    "optimizer.accumulation=adama train.microbatches=2 optimizer.second_moment=row",
    "optimizer.accumulation=in_place model.loop=stack train.microbatches=2",
    "optimizer.accumulation=released model.loop=stack optimizer.clip=value",
    "optimizer.moments=int8",
]

# JAX itself looks up the rows of a table, and draws random bits, with automatic axes.
LOOKUP = {
    "reshard", "lt", "add", "select_n", "broadcast_in_dim", "gather", "scatter-add", "reshape",
    "convert_element_type",
}  # fmt: skip
BITS = {
    "jit",
    "random_bits",
    "shift_right_logical",
    "or",
    "bitcast_convert_type",
    "sub",
    "mul",
    "max",
}


def equations(jaxpr):
    """Every equation of a program, of its loops and of its branches."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                inner = one.jaxpr if isinstance(one, core.ClosedJaxpr) else one
                if isinstance(inner, core.Jaxpr):
                    yield from equations(inner)


def traced(name, way, devices=4):
    """The equations of a step over a mesh whose axes are explicit."""
    settings = f"{MICRO} {MESH} {way} mesh.axes=explicit plan.budget=none"
    config = load(name, settings.split())
    with sharding.within(sharding.over(config.mesh, devices)):
        return [*equations(jax.make_jaxpr(make_step(config))(*abstract(config)).jaxpr)]


def axes_of(value):
    """The axes that divide a value, by its type."""
    each = (one if isinstance(one, tuple) else (one,) for one in value.aval.sharding.spec if one)
    return {axis for axes in each for axis in axes}


def has_automatic_axes(equation):
    found = (v.aval.sharding for v in equation.outvars if hasattr(v.aval, "sharding"))
    return any(AxisType.Auto in one.mesh.axis_types for one in found)


@pytest.mark.quick("llama_nano-")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpt_nano", "llama_nano"])
def test_each_operation_of_a_step_has_explicit_axes(name, way):
    found = traced(name, f"{way} model.dropout=0.0" if name == "gpt_nano" else way)
    automatic = {e.primitive.name for e in found if has_automatic_axes(e)}
    assert {"gather", "scatter-add"} <= automatic <= LOOKUP
    assert "sharding_constraint" not in {e.primitive.name for e in found}
    products = [e for e in found if e.primitive.name == "dot_general"]
    assert len(products) > 16
    for product in products:
        if max(one.aval.size for one in product.invars) > 64:  # no sketch of a norm's moments
            assert any(axes_of(one) for one in (*product.invars, *product.outvars)), "divided"
    assert sum("tensor" in axes_of(e.outvars[0]) for e in products) > len(products) / 2


def test_masks_of_dropout_are_drawn_divided():
    found = traced("gpt_nano", "model.dropout=0.1 model.attention_dropout=0.1")
    assert {e.primitive.name for e in found if has_automatic_axes(e)} <= LOOKUP | BITS
    masks = [e for e in found if e.primitive.name == "jaxmem_tag" and "mask" in str(e.params)]
    assert len(masks) >= 3
    for mask in masks:
        divides_heads = {"tensor"} if "attn_mask" in str(mask.params) else set()
        assert axes_of(mask.outvars[0]) == {*sharding.ROWS} | divides_heads


@pytest.mark.parametrize("name", ["gpt_moe_nano", "bert_base"])
def test_other_models_leave_their_operations_to_xla(name):
    way = "model.vocab=260 optimizer.clip=value model.dtype=float32"
    found = traced(name, way if name == "bert_base" else "")
    assert any(has_automatic_axes(e) for e in found if e.primitive.name == "dot_general")


def test_gathered_parameters_are_whole_over_rows():
    """Moments and parameters keep the division of `fsdp`; products read whole features."""
    config = load("llama_nano", f"{MICRO} {MESH} mesh.axes=explicit".split())
    with sharding.within(sharding.over(config.mesh, 4)):
        state, _ = abstract(config)

        def specs(layer):
            return jax.tree.map(lambda a: tuple(jax.typeof(a).sharding.spec), layer)

        seen = {}

        def read(params):
            layer = jax.tree.map(lambda a: a[0], params["blocks"])
            seen["stored"], seen["gathered"] = specs(layer), specs(sharding.gathered(layer))
            return params

        jax.eval_shape(read, state.params)
    assert seen["stored"]["up"]["kernel"] == ("fsdp", "tensor")
    assert seen["gathered"]["up"]["kernel"] == (None, "tensor")
    assert seen["gathered"]["down"]["kernel"] == ("tensor", None)
    assert models.is_explicit(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "devices", "ways"),
    [
        (MESH, 4, WAYS[:3]),
        (MESH, 4, WAYS[3:6]),
        (MESH, 4, WAYS[6:]),
        ("mesh.data=2 mesh.fsdp=2 mesh.tensor=2", 8, WAYS[:1]),
    ],
)
@pytest.mark.parametrize("name", ["gpt_nano", "llama_nano"])
def test_losses_are_those_of_automatic_axes(name, mesh, devices, ways, text):
    """The parameters move, and remain divided."""
    given = [
        f"{name} {MICRO} {way} {mesh} plan.budget=none mesh.axes={axes} {text}"
        for way in ways
        for axes in ("auto", "explicit")
    ]
    found = children.printed(children.with_cpus(devices), "tests.programs.meshed", 4, *given)
    for way, auto, explicit in zip(ways, found[::2], found[1::2]):
        np.testing.assert_allclose(explicit["losses"], auto["losses"], rtol=1e-5, err_msg=way)
        np.testing.assert_allclose(
            explicit["found"]["val_loss"], auto["found"]["val_loss"], rtol=1e-5, err_msg=way
        )
        assert len(set(auto["losses"])) == 4
        assert min(explicit["moved"], auto["moved"]) > 1e-6
        assert explicit["share"] == auto["share"] < 0.45
        assert "@fsdp" in explicit["type"]
        assert "@fsdp" not in auto["type"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "budget"), [("gpt_nano", 280_000), ("llama_nano", 720_000)])
def test_a_plan_over_explicit_axes_has_the_losses_of_automatic_axes(name, budget, text):
    planned = f"{name} {MICRO} {MESH} plan.budget={budget} plan.actions=lossless {text}"
    given = [f"{planned} mesh.axes={axes}" for axes in ("auto", "explicit")]
    auto, explicit = children.printed(children.with_cpus(4), "tests.programs.meshed", 4, *given)
    np.testing.assert_allclose(explicit["losses"], auto["losses"], rtol=1e-5)
    compiled, everything_kept = explicit["bytes"]
    assert compiled <= budget < everything_kept

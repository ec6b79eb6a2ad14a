"""A plan over the names of MaxText's remat policy `custom`: MaxText under the plan's flags compiles
to the plan's bytes, and trains to the same loss. MaxText loads and runs the plan's executable.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from maxtext.configs.types import RematLocation
from maxtext.utils import maxtext_utils

import jaxmem
from examples.stacks.maxtext import build_of
from jaxmem._result.plan.maxtext import TENSORS
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace
from jaxmem.plans import Assignment, Choice
from tests.shared import plans

sys.path.insert(0, os.path.dirname(__file__))  # a package of MaxText's is called `tests` too
from maxtext_step import maxtext_step, settings

SMALL = (
    "internal_compile=True", "internal_compile_num_devices=1", "max_target_length=256",
    "vocab_size=512",
)  # fmt: skip
small_step = functools.partial(maxtext_step, layers=3, width=128)


def under(flags: dict[str, str]):
    """MaxText's step under the flags of a plan."""
    rest = [f"{name}={value}" for name, value in flags.items() if name != "remat_policy"]
    return small_step(flags["remat_policy"], extra=(*SMALL, *rest))


def numbers(tree, key=0):
    """Arrays in place of shapes: small numbers for parameters, and moments of at least zero."""
    keys = iter(jax.random.split(jax.random.key(key), 999))

    def one(path, a):
        name = jax.tree_util.keystr(path)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            made = jax.random.split(next(keys), a.shape)
        elif jnp.issubdtype(a.dtype, jnp.floating):
            made = 0.02 * jax.random.normal(next(keys), a.shape, a.dtype)
            made = jnp.abs(made) if "'nu'" in name else made
        elif name.startswith("[0]"):
            made = jnp.ones(a.shape, a.dtype)
        elif "position" in name:
            made = jnp.broadcast_to(jnp.arange(a.shape[1], dtype=a.dtype), a.shape)
        elif "segmentation" in name:
            made = jnp.ones(a.shape, a.dtype)
        else:
            made = jax.random.randint(next(keys), a.shape, 0, 512, a.dtype)
        return jax.device_put(made, a.sharding)

    return jax.tree_util.tree_map_with_path(one, tree)


def test_the_names_are_those_that_maxtext_reads():
    fields = type(small_step("full", extra=SMALL).config._pydantic_config).model_fields
    locations = {name for name, field in fields.items() if field.annotation is RematLocation}
    assert locations >= TENSORS
    settable = locations - {"indexer_cutoff_threshold", "engram"}
    read = small_step("custom", extra=(*SMALL, *(f"{n}=device" for n in sorted(settable)))).config
    assert set(read.tensors_on_device) == TENSORS - {"indexer_cutoff_threshold"} == settable


def test_without_a_policy_maxtext_recomputes_everything():
    """So that no flag of MaxText runs its layers without a checkpoint."""

    def program(policy: str) -> str:
        made = small_step(policy, extra=SMALL)
        with made.entered():
            return made.jitted(made.step).lower(*made.args).as_text()

    assert program("none") == program("full") != program("minimal")


def test_the_example_prints_the_flags_of_the_plan_that_it_saves(tmp_path):
    file = tmp_path / "plan.json"
    command = [sys.executable, "-m", "examples.stacks.maxtext", "--target", "local"]
    command += ["--budget", "83MiB", "--out", str(file), *settings("full", layers=3, width=128)]
    said = subprocess.run([*command, *SMALL], check=True, stdout=subprocess.PIPE, text=True).stdout
    plan = jaxmem.Plan.load(file)
    flags = dict(flag.split("=") for flag in said.splitlines()[-1].split())
    assert flags == plan.to_maxtext()
    assert flags["remat_policy"] == "custom"
    assert set(plan.choices_for("block")) < set(flags)


OFFLOADS = {"query_proj": "offload", "mlpwi_0": "offload", "key_proj": "keep", "out_proj": "keep"}


def test_the_flags_and_the_policy_of_a_plan_are_one_program():
    program = lambda step, made: (
        step.trace(*made.args).lower(lowering_platforms=("cuda",)).as_text()
    )
    made = small_step("full", extra=SMALL)
    decided = {n: Choice(action) for n, action in OFFLOADS.items()}
    plan = plans.plan(actions={"block": decided})
    own = under(plan.to_maxtext())
    with made.entered():
        planned = program(build_of(made)(plan), made)
        full = program(made.jitted(made.step), made)
    with own.entered():
        flagged = program(own.jitted(own.step), own)
    assert "pinned_host" in planned
    assert planned == flagged != full


def test_offload_by_flags_is_offload_by_a_policy():
    made = small_step("full", extra=SMALL)
    by_hand = Assignment({"block": {n: Choice(action) for n, action in OFFLOADS.items()}})
    with made.entered():
        plan = jaxmem.plans.price(build_of(made), by_hand, *made.args, target="h200")
    flags = plan.to_maxtext()
    assert {n: flags[n] for n in ("query_proj", "mlpwi_0", "key_proj", "decoder_layer_input")} == {
        "query_proj": "offload", "mlpwi_0": "offload", "key_proj": "device",
        "decoder_layer_input": "remat",
    }  # fmt: skip
    made = under(flags)
    with made.entered(), backend_for(Target.parse("h200"), workers=1) as backend:
        staged = trace(lambda _: made.jitted(made.step), None, made.args)
        compiled = backend.compile_fully(*staged).result()
    assert compiled.host_bytes == plan.host_bytes > 0
    assert compiled.total_bytes == pytest.approx(plan.compiled_bytes, rel=0.01)


NAMES = (
    "decoder_layer_input", "query_proj", "key_proj", "value_proj", "attention_out", "out_proj",
    "mlpwi_0", "mlpwi_1",
)  # fmt: skip


@pytest.mark.parametrize("devices", [1, 2])
def test_maxtext_trains_under_the_flags_and_runs_the_saved_executable(tmp_path, devices):
    extra = (*SMALL[:1], f"internal_compile_num_devices={devices}", *SMALL[2:])
    made = small_step("full", extra=extra)
    with made.entered():
        build = build_of(made)
        ends = (Assignment.nothing(), Assignment({"block": dict.fromkeys(NAMES, "keep")}))
        least, most = (jaxmem.plans.price(build, end, *made.args).compiled_bytes for end in ends)
        assert 1.05 * least < most
        plan = jaxmem.plan(build, *made.args, budget=(least + most) // 2, actions="lossless")
    flags = plan.to_maxtext()
    assert {"device", "remat"} < set(flags.values())
    # MaxText's own step under the flags: the bytes and the results of the plan's step.
    rest = [f"{name}={value}" for name, value in flags.items() if name != "remat_policy"]
    file = tmp_path / "step.pickle"
    own = small_step("custom", extra=(*extra, *rest, f"compiled_trainstep_file={file}"))
    with own.entered():
        by_flags = own.jitted(own.step).lower(*own.args).compile()
    found, expected = (s.memory_analysis().temp_size_in_bytes for s in (by_flags, plan.step))
    assert found == pytest.approx(expected, rel=0.01)
    # MaxText's own loader reads the file that `save_compiled` wrote.
    plan.save_compiled(file)
    state, _ = own.args
    with own.entered():
        loaded = maxtext_utils.load_compiled(
            own.config, own.step, state, own.mesh.devices.flatten().tolist()
        )
    start = [np.asarray(a) for a in jax.tree.leaves(parameters(numbers(own.args)[0]))]
    results = [step(*numbers(own.args)) for step in (plan.step, loaded, by_flags)]
    losses = [float(metrics["scalar"]["learning/loss"]) for _, metrics in results]
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-6)
    assert losses[0] > 1.0
    ends = [[np.asarray(a) for a in jax.tree.leaves(parameters(state))] for state, _ in results]
    for before, planned, read, flagged in zip(start, *ends):
        assert (before != planned).any(), "every parameter moves"
        np.testing.assert_array_equal(planned, read)
        np.testing.assert_allclose(planned, flagged, rtol=1e-4, atol=1e-6)


def parameters(state) -> list:
    """The floating arrays of the model in a state of MaxText."""
    leaves = jax.tree.leaves(state["model"])
    return [a for a in leaves if jnp.issubdtype(a.dtype, jnp.floating)]

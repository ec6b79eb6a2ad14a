"""The steps that others measured, as `benchmarks.published` rebuilds them."""

import math

import jax
import pytest

from benchmarks.published import DENSE, NOTEBOOK, PUBLISHED
from benchmarks.shared.decoder import flags_of, policy_of, step_of
from jaxmem._trace.step import trace
from jaxmem.plans import Target

COUNTED = [name for name in DENSE if "parameters_derived" in PUBLISHED[name]["measured"]]
pytestmark = pytest.mark.jax_defaults


@pytest.mark.parametrize("name", COUNTED)
def test_a_decoder_has_the_published_parameters(name):
    row = PUBLISHED[name]
    _, ((params, _), _) = step_of(row)
    count = sum(math.prod(a.shape) for a in jax.tree.leaves(params))
    assert count == pytest.approx(row["measured"]["parameters_derived"], rel=1e-3)


@pytest.mark.parametrize("name", DENSE)
def test_a_row_names_a_target_of_as_many_devices_as_its_mesh(name):
    row = PUBLISHED[name]
    _, (state, tokens) = step_of(row)
    assert Target.parse(row["target"]).devices == row["devices"] == tokens.sharding.mesh.size
    assert tokens.shape == (row["batch_per_device"] * row["devices"], row["sequence"] + 1)
    assert callable(policy_of(row))
    # Every matrix is divided over all devices.
    matrices = [a for a in jax.tree.leaves(state[0]) if a.ndim > 2]
    parts = [math.prod(a.sharding.shard_shape(a.shape)) for a in matrices]
    assert [row["devices"] * part for part in parts] == [a.size for a in matrices]


def test_a_step_is_traced_with_its_kernels():
    build, args = step_of(PUBLISHED["v6e-8-llama3.1-8b"])
    text = str(trace(build, None, args)[1].jaxpr)
    assert "pallas_call" in text
    assert "<host>" in text


def test_flags_are_those_that_the_row_names():
    flags = flags_of(PUBLISHED["v6e-8-llama3.1-8b"])
    assert "scoped_vmem_limit_kib=98304" in flags
    assert "windowed_einsum_mib=1000000" in flags
    assert "windowed_einsum" not in flags_of(PUBLISHED["v6e-64-llama3.1-8b"])
    assert flags_of(PUBLISHED["v4-384-52b"]) == ""


def test_rows_aside_are_of_every_kind_but_one():
    aside = {PUBLISHED[name]["hardware"] for name in DENSE if PUBLISHED[name]["aside"]}
    assert aside == {"TPU v5e", "TPU v5p", "TPU v6e"}
    assert len(NOTEBOOK) == 3

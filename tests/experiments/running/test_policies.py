"""Named policies: each trains exactly the unplanned model, saves what it should, and searches end
within their budget. Those of a Llama, whose layers hold other tensors than a GPT's, and of an OPT.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from experiments.command.load import load
from experiments.config.text import Config
from experiments.errors import InputError
from experiments.models.loops import scanned
from experiments.running import planning
from experiments.running import policies as baselines
from experiments.running.planning import compile_candidate
from experiments.running.policies import FIXED, LOSSY, SEARCHES
from experiments.steps.step import make_loss
from jaxmem.plans import compiled_bytes
from tests.experiments.states import first_state, saved_by_policy, tokens
from tests.shared.compare import close
from tests.shared.marks import slow

MICRO = (
    "model.layers=5", "model.width=32", "model.heads=2", "model.dropout=0.1",
    "model.attention_dropout=0.1", "train.batch=4", "train.sequence=32", "train.loss_chunk=8",
)  # fmt: skip
EVERY = ("every_k=1", "every_k=2", "every_k=5")  # of five layers: with one left over, and with none
NAMED = (*FIXED, *EVERY)
QUICK = ("compress_tags", "every_k=2")
every_name = lambda names: [n if n in QUICK else slow(n) for n in names]


def micro(name: str, *overrides) -> Config:
    policy, _, k = name.partition("=")
    every = (f"remat.every_k={k}",) if k else ()
    return load("gpt_nano", (*MICRO, f"remat.policy={policy}", *every, *overrides))


@functools.cache
def loss_and_gradient(name: str | None, *overrides):
    """Under a policy, or under jaxmem's without a plan."""
    config, loop = micro(name or "keep_everything", *overrides), scanned(jaxmem.remat_policy(None))
    if name:
        (candidate,) = baselines.candidates(config)
        loop = scanned(candidate.policy, candidate.every)
    loss, key = make_loss(config, loop), jax.random.key(3)
    return jax.jit(jax.value_and_grad(loss))(first_state(config).params, tokens(config), key)


@functools.cache
def saved_bytes(name: str) -> int:
    return saved_by_policy(micro(name))


@pytest.mark.quick("every_k=2")
@pytest.mark.parametrize("name", every_name(NAMED))
def test_the_loss_in_float32_is_the_unplanned_one_bit_for_bit(name):
    value, _ = loss_and_gradient(name)
    assert jnp.isfinite(value)
    assert value == loss_and_gradient(None)[0]


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", every_name([n for n in NAMED if n not in LOSSY]))
def test_the_gradient_in_float64_is_the_unplanned_one(name):
    jax.config.update("jax_enable_x64", True)  # the fixture of the module's marker sets it back
    value, gradient = loss_and_gradient(name, "model.dtype=float64")
    expected, reference = loss_and_gradient(None, "model.dtype=float64")
    assert value.dtype == jnp.float64
    np.testing.assert_allclose(value, expected, rtol=1e-14)
    close(gradient, reference)


def flat(tree):
    return np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)])


@pytest.mark.parametrize("name", every_name(LOSSY))
def test_what_compresses_changes_the_gradient_a_little(name):
    exact, gradient = flat(loss_and_gradient(None)[1]), flat(loss_and_gradient(name)[1])
    assert 1e-5 < 1 - gradient @ exact / np.linalg.norm(gradient) / np.linalg.norm(exact) < 0.1


def test_policies_save_what_they_name():
    n, least = saved_bytes, saved_bytes("nothing_saveable")
    rising = (
        "nothing_saveable", "save_out_proj", "save_qkv_proj", "save_dot_except_mlp", "minimal",
        "minimal_with_context", "keep_tags", "keep_everything",
    )  # fmt: skip
    assert all(n(less) < n(more) for less, more in itertools.pairwise(rising))
    assert n("qkv_proj_offloaded") == n("save_qkv_proj")  # on this device or on the host
    assert n("minimal_offloaded") == n("minimal")
    products = "dots_with_no_batch_dims_saveable", "offload_dot_with_no_batch_dims"
    assert least < n(products[0]) == n(products[1])
    config = micro("minimal")
    shape = config.train.batch, config.train.sequence, config.model.width, config.model.layers
    value = 4 * math.prod(shape)
    for name, values in (("save_out_proj", 1), ("save_qkv_proj", 3), ("minimal", 3 + 1 + 4)):
        # A bias that only recomputation reads is not handed on.
        assert 0.98 * values * value < n(name) - least <= values * value
    assert max(n(name) for name in LOSSY) < n("keep_tags") / 2


def test_recomputing_every_kth_layer_saves_between_all_and_none():
    sizes = [saved_bytes(name) for name in ("nothing_saveable", *EVERY[1:], "keep_everything")]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)
    assert saved_bytes("every_k=1") == saved_bytes("nothing_saveable")


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_ends_within_its_budget_at_its_first_candidate_that_fits(name, monkeypatch):
    compiled = {}

    def once(config, candidate):
        key = str(candidate.found)
        compiled[key] = compiled.get(key) or compile_candidate(config, candidate)
        return compiled[key]

    monkeypatch.setattr(planning, "compile_candidate", once)
    tried = list(baselines.candidates(micro(name)))
    totals = [compiled_bytes(once(micro(name), one)) for one in tried]
    assert min(totals) < totals[0]
    budget = totals[0] - 1
    ready = planning.prepare(micro(name, f"plan.budget={budget}"))
    first = next(i for i, total in enumerate(totals) if total <= budget)
    assert (ready.compiled_bytes, ready.compiles) == (totals[first], first + 1)
    assert ready.found == tried[first].found
    assert ready.policy == name
    assert first > 0
    said = rf"plan\.budget: got {min(totals) - 1:,} bytes; the least of the {len(tried)} s"
    with pytest.raises(InputError, match=said):
        planning.prepare(micro(name, f"plan.budget={min(totals) - 1}"))


def test_the_estimators_order_is_that_of_sizes_alone(monkeypatch):
    monkeypatch.setattr(baselines.jax, "default_backend", lambda: "gpu")
    steps = [one.found["actions"] for one in baselines.estimator(micro("estimator"))]
    order = ("up", "qkv", "attn", "mid")  # width and sequence are equal
    assert [*steps[0].items()] == [(name, "keep") for name in order]
    assert steps[4] == dict.fromkeys(steps[0], "offload")
    assert steps[5] == steps[4] | {"up": "recompute"}
    assert steps[-1] == dict.fromkeys(steps[0], "recompute")
    assert len(steps) == 9
    longer = load("gpt_117m", ["remat.policy=estimator"])
    assert next(iter(next(baselines.estimator(longer)).found["actions"])) == "attn"


def test_tags_of_other_models_are_theirs():
    """tests/experiments/models compares these tables with traced steps."""
    named = lambda name: set(baselines.tags_of(load(name).model)[0])
    assert named("opt_30b") == set(baselines.KINDS) - {"gelu"} | {"relu"}
    assert named("llama_nano") == set(baselines.LLAMA_KINDS)


@functools.cache
def llama_saves(name: str) -> int:
    small = "model.layers=3", "model.width=32", "train.batch=2", "train.sequence=64"
    return saved_by_policy(load("llama_nano", (*small, f"remat.policy={name}")))


def test_policies_save_of_a_llama_what_they_name():
    values = 3 * 2 * 64 * 4  # bytes of a feature in all layers
    for name, features in (
        ("save_out_proj", 32),
        ("save_qkv_proj", 32 + 16 + 16),
        ("save_dot_with_context_except_mlp", 32 + 16 + 16 + 32 + 32),
        ("minimal", 32 + 16 + 16 + 32 + 384 + 384),
    ):
        assert llama_saves(name) - llama_saves("nothing_saveable") == features * values, name
    most = ("keep_everything", "keep_tags", "minimal", "compress_tags")
    sizes = [llama_saves(name) for name in most]
    assert sizes == sorted(sizes, reverse=True)


def test_the_estimators_order_of_a_llama_is_that_of_its_kernels():
    config = load("mistral_7b", ["remat.policy=estimator", "model.loop=scan",
                                 "optimizer.accumulation=scan", "optimizer.clip=norm"])  # fmt: skip
    order = list(next(baselines.estimator(config)).found["actions"])
    assert order == ["gate", "up", "q", "mid", "k", "v", "attn"]

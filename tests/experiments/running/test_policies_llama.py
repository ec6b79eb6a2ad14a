"""Named policies of a Llama, whose layers hold other tensors than a GPT's, and of an OPT."""

import functools

from experiments.command.load import load
from experiments.running import policies as baselines
from tests.experiments.states import saved_by_policy


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

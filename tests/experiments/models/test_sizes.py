"""Models have the published numbers of parameters. Nothing is allocated to know them."""

import math

import jax
import jax.numpy as jnp
import pytest

from experiments.command.load import FOLDER, load
from experiments.steps.step import abstract

pytestmark = pytest.mark.core

PUBLISHED = {
    "gpt_117m": 124_439_808,
    "gpt_345m": 354_823_168,
    "gpt_4b7": 4_688_987_136,
    "opt_30b": 29_974_525_952,
    "llama_13b": 13_015_864_320,
    "llama_34b": 33_743_970_304,
    "mistral_7b": 7_241_732_096,
    "bert_base": 109_514_298,
    "bert_large": 335_174_458,
}
NAMED_AFTER = {f"gpt_{n}b": n * 1e9 for n in (1, 10, 20, 30, 40, 175)}


@pytest.mark.parametrize("name", [*PUBLISHED, *NAMED_AFTER])
def test_sizes_are_the_published_ones_and_those_of_the_configs_header(name):
    is_bert = name.startswith("bert")
    state, _ = abstract(load(name, ["train.sequence=512"] if is_bert else []))
    leaves = jax.tree.leaves(state.params)
    assert {a.dtype for a in leaves} == {jnp.dtype("float32")}
    found = sum(math.prod(a.shape) for a in leaves)
    if name in PUBLISHED:
        assert found == PUBLISHED[name]
    else:
        assert found == pytest.approx(NAMED_AFTER[name], rel=0.02)
    header = (FOLDER / f"{name}.toml").read_text(encoding="utf-8").split("[model]")[0]
    assert is_bert or f"({found:,}" in header

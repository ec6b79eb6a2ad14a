"""The texts of codecs are read without JAX, since a plan's file is."""

import json

from jaxmem import codecs
from jaxmem._model.codecs.registry import CODECS, is_lossless
from jaxmem.errors import TagError
from tests.shared import children

TEXTS = [
    *CODECS, "grouped_symmetric(group=32,scale=float32,stochastic=true)",
    " outlier_separated ( capacity = 4 , group=8 ) ", "grouped_asymmetric(stochastic=true,seed=3)",
]  # fmt: skip
WRONG = [
    "groped()", "grouped_symmetric(", "grouped_symmetric(group)", "grouped_symmetric(group=63)",
    "naive_per_token(scale=float16)", "bit_mask(group=2)", "outlier_separated(seed=4294967296)", 7,
]  # fmt: skip
SCRIPT = """
import json, sys
from jaxmem._model.codecs.registry import parse
from jaxmem.errors import TagError

def read(text):
    try:
        return str(parse(text))
    except TagError as error:
        return str(error)

print(json.dumps([read(text) for text in json.loads(sys.argv[1])]))
assert not {"jax", "numpy"} & set(sys.modules), sorted(sys.modules)
"""


def read(text) -> str:
    try:
        return str(codecs.parse(text))
    except TagError as error:
        return str(error)


def test_texts_are_read_without_jax():
    texts = [*TEXTS, *WRONG]
    done = children.python("-c", SCRIPT, json.dumps(texts))
    assert json.loads(done.stdout) == [read(text) for text in texts]


def test_a_codec_is_lossless_by_its_name():
    assert [name for name in CODECS if is_lossless(name)] == ["bit_mask"]

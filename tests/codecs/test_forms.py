"""The JAX-free side of the codecs: the same names, fields, texts and errors as the codecs'."""

import dataclasses

import pytest

from jaxmem import codecs
from jaxmem._model.codecs import forms
from jaxmem._model.codecs.registry import CODECS
from jaxmem.errors import TagError

pytestmark = pytest.mark.core


def test_every_codec_has_its_form():
    assert list(forms.FORMS) == list(CODECS)
    for name, form in forms.FORMS.items():
        assert issubclass(CODECS[name], form)
        fields = [(f.name, f.default) for f in dataclasses.fields(form)]
        assert fields == [(f.name, f.default) for f in dataclasses.fields(CODECS[name])]


@pytest.mark.parametrize(
    "text",
    [
        *CODECS,
        "grouped_symmetric(group=32,scale=float32,stochastic=true)",
        " outlier_separated ( capacity = 4 , group=8 ) ",
        "channelwise_symmetric(stochastic=false)",
        "grouped_asymmetric(stochastic=true,seed=3)",
    ],
)
def test_a_text_is_read_alike(text):
    assert str(forms.parse(text)) == str(codecs.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "groped()",
        "grouped_symmetric(",
        "grouped_symmetric(group)",
        "grouped_symmetric(group=63)",
        "grouped_symmetric(grup=64)",
        "grouped_symmetric(group=64,group=64)",
        "naive_per_token(scale=float16)",
        "channelwise_symmetric(stochastic=maybe)",
        "outlier_separated(capacity=-1)",
        "bit_mask(group=2)",
        "outlier_separated(seed=4294967296)",
        "",
        7,
    ],
)
def test_a_wrong_text_is_refused_alike(text):
    with pytest.raises(TagError, match="expected") as by_codec:
        codecs.parse(text)
    with pytest.raises(TagError, match="expected") as by_form:
        forms.parse(text)
    assert str(by_form.value) == str(by_codec.value)

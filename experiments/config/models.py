"""The section `model` of an experiment on text: a GPT, a Llama or a BERT."""

from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field

from experiments.config import sections
from experiments.config.sections import Count, Dtype, NonNegative, Positive, Probability, Section

OWNERS = {  # keys that only some kinds of models have
    **dict.fromkeys(("dropout", "attention_dropout"), ("gpt", "bert")),
    **dict.fromkeys(("activation", "experts", "experts_per_token", "balance"), ("gpt",)),
    **dict.fromkeys(("kv_heads", "hidden", "rope_base", "tied"), ("llama",)),
}


class Model(Section):
    """The architecture of GPT-2 (pre-layer-norm, learned positions, biases, the head tied to the
    embedding), BERT, or Llama (RMS norms, rotary positions, grouped queries, SwiGLU, no biases).
    """

    kind: Literal["gpt", "bert", "llama"] = "gpt"
    layers: Count
    width: Count
    heads: Count
    # Text is read as bytes. A larger vocabulary has tokens that no text contains.
    vocab: Annotated[int, Field(ge=256, le=sections.LARGEST)] = 256
    dropout: Probability = 0.0  # dropout of both residual branches
    attention_dropout: Probability = 0.0
    activation: Literal["gelu", "relu"] = "gelu"  # activation of a GPT; OPT is a GPT with relu
    experts: Count = 1  # MLPs of a GPT's layer
    experts_per_token: Count = 2  # how many of several experts a token uses
    balance: NonNegative = 0.01  # the weight of the loss that balances the loads of experts
    kv_heads: Count | None = None  # heads of keys and values in a Llama; default: `heads`
    hidden: Count | None = None  # features between a Llama's gate and down; default: 4 * width
    rope_base: Positive = 10_000.0  # in a Llama, position s rotates pair i by s * base^(-2 i / K)
    tied: bool = False  # whether a Llama's head is its embedding
    attention: Literal["materialized", "fused"] = "materialized"
    dtype: Dtype = "float32"  # dtype of computation; parameters are float32 at least
    loop: Literal["scan", "stack"] = "scan"  # layer loop: jax.lax.scan, or jaxmem.stack

    @property
    def shared_width(self) -> int:
        """Number of features of a Llama's keys at one position; the values have as many."""
        return self.width // self.heads * (self.kv_heads or self.heads)

    @property
    def hidden_width(self) -> int:
        """Number of features between a Llama's gate and down."""
        return self.hidden or 4 * self.width

    @pydantic.model_validator(mode="after")
    def _belongs(self) -> Self:
        family, _, _ = self.kind.partition("_")  # "bert_glue" is a BERT
        for key, kinds in OWNERS.items():
            if key in self.model_fields_set and family not in kinds:
                raise ValueError(
                    f"model.{key}: got {getattr(self, key)!r}; allowed with model.kind ="
                    f" {' or '.join(map(repr, kinds))} only, and it is {self.kind!r}"
                )
        return self

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        if self.width % self.heads:
            raise ValueError(
                f"model.width: got {self.width}; allowed: a multiple of model.heads, {self.heads}"
            )
        if 1 < self.experts < self.experts_per_token:
            raise ValueError(
                f"model.experts_per_token: got {self.experts_per_token}; allowed: at most"
                f" model.experts, {self.experts}"
            )
        if self.kind == "bert" and self.vocab < 257:
            raise ValueError(
                f"model.vocab: got {self.vocab}; allowed for a BERT: at least 257, bytes and [MASK]"
            )
        if self.attention == "fused" and self.attention_dropout:
            raise ValueError(
                f"model.attention_dropout: got {self.attention_dropout}; allowed with"
                " model.attention = 'fused': 0.0,"
                " since a fused attention shows no probabilities to drop"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _fits_a_llama(self) -> Self:
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(
                f"model.kv_heads: got {self.kv_heads}; allowed: a divisor of model.heads,"
                f" {self.heads}, since as many heads share each"
            )
        if self.kind == "llama" and self.width // self.heads % 2:
            raise ValueError(
                f"model.heads: got {self.heads}, of {self.width // self.heads} features each;"
                " allowed for a Llama: heads of an even size, since rotary positions turn pairs"
            )
        return self

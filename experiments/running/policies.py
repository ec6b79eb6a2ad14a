"""The alternatives to jaxmem for a JAX user: named policies for the `jax.checkpoint` of a GPT's or
a Llama's layers, and two searches over policies.

Tags of the GPT correspond to names in MaxText's policies. `qkv` is query_proj, key_proj and
value_proj; `attn` is context; `up` is mlpwi. `mid`, the residual stream after out_proj, replaces
out_proj: it has as many bytes, and differs by one addition in recomputation. No backward reads
mlpwo, so saving mlpwo changes nothing. A Llama has `q`, `k` and `v` in place of `qkv`, and `gate`
and `up` in place of `up`. A MaxText policy keeps the corresponding tags, as
`save_only_these_names` does; JAX's own policies are used unchanged. `nothing_saveable` is MaxText's
`full` and Adacc's full recomputation. `compress_tags` is Adacc with compression only, each tag
under the codec of its kind. `compress_tags_without_outliers` is Adacc's ablation, and `naive_int4`
the scheme that Adacc is compared with.

XLA's own rematerialization is on by default, and so under every policy. `keep_everything` has no
other rematerialization.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

import jaxmem
from experiments.config.models import Model
from experiments.config.text import Config
from jaxmem.plans import Action, Assignment, Choice

KINDS = {
    "resid_in": "residual", "ln1": "norm", "qkv": "qkv", "probs": "softmax", "attn_mask": "mask",
    "attn": "linear", "attn_out_mask": "mask", "mid": "residual", "ln2": "norm", "up": "linear",
    "gelu": "gelu", "mlp_out_mask": "mask",
}  # fmt: skip
LLAMA_KINDS = {
    "resid_in": "residual", "norm1": "norm", "q": "qkv", "k": "qkv", "v": "qkv",
    "probs": "softmax", "attn": "linear", "mid": "residual", "norm2": "norm", "gate": "linear",
    "up": "linear", "sigmoid": "softmax", "glu": "gelu",
}  # fmt: skip
LLAMA_PARTS = {"qkv": ("q", "k", "v"), "up": ("gate", "up")}
KEPT = {
    "save_out_proj": ("mid",),
    "save_qkv_proj": ("qkv",),
    "save_dot_except_mlp": ("qkv", "mid"),
    "save_dot_with_context_except_mlp": ("qkv", "attn", "mid"),
    "minimal": ("qkv", "mid", "up"),
    "minimal_with_context": ("qkv", "attn", "mid", "up"),
}
OFFLOADED = {"qkv_proj_offloaded": ("qkv",), "minimal_offloaded": ("qkv", "mid", "up")}
Choices = dict[str, Choice]  # by tag; missing tags are recomputed
Kinds = dict[str, str]  # by tag
Parts = dict[str, tuple[str, ...]]  # the model's tags that replace a tag of the GPT, by that tag


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A policy for the layers' checkpoints. `every` k: only each k-th layer has the policy.
    `found`: the decisions of a search.
    """

    policy: Callable[..., Any]
    every: int = 1
    found: dict[str, Any] = dataclasses.field(default_factory=dict)


def naive(kind: str | None) -> str:
    """Returns the codec of naive INT4, with a scale for each token; one bit for a mask."""
    codecs = jaxmem.codecs
    return str(codecs.BitMask() if kind == "mask" else codecs.NaivePerToken())


def own(kind: str | None) -> str:
    """Returns the codec of the tag's kind (Adacc 3.2)."""
    return str(jaxmem.codecs.default_for(kind))


def without_outliers(kind: str | None) -> str:
    """Returns the codec of the tag's kind, or grouped INT4 if that codec separates outliers."""
    codec = jaxmem.codecs.default_for(kind)
    return str(
        jaxmem.codecs.GroupedSymmetric()
        if isinstance(codec, jaxmem.codecs.OutlierSeparated)
        else codec
    )


def assignments(kinds: Kinds, parts: Parts) -> dict[str, Choices]:
    """Returns the choices of each policy that names tags, for a model's tags (`tags_of`)."""

    def every(action: Action, tags: Iterable[str]) -> Choices:
        return {part: Choice(action) for tag in tags for part in parts.get(tag, (tag,))}

    def compressed(codec_of: Callable[[str | None], str]) -> Choices:
        return {tag: Choice(Action.COMPRESS, codec_of(kind)) for tag, kind in kinds.items()}

    return (
        {"keep_tags": dict.fromkeys(kinds, Choice(Action.KEEP))}
        | {name: every(Action.KEEP, tags) for name, tags in KEPT.items()}
        | {name: every(Action.OFFLOAD, tags) for name, tags in OFFLOADED.items()}
        | {
            "compress_tags": compressed(own),
            "compress_tags_without_outliers": compressed(without_outliers),
            "naive_int4": compressed(naive),
        }
    )


def tags_of(model: Model) -> tuple[Kinds, Parts]:
    """Returns the kinds of a model's tags, and the model's tags that replace one tag of the GPT."""
    if model.kind == "llama":
        return LLAMA_KINDS, LLAMA_PARTS
    return {model.activation if tag == "gelu" else tag: kind for tag, kind in KINDS.items()}, {}


ASSIGNMENTS = assignments(KINDS, {})
JAX_POLICIES = {
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload_dot_with_no_batch_dims": jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    ),
}
FIXED = ("keep_everything", *JAX_POLICIES, *ASSIGNMENTS)
SEARCHES = ("every_k", "estimator")
LOSSY = ("compress_tags", "compress_tags_without_outliers", "naive_int4")


def policy_of(choices: Choices):
    """Returns the policy of `jax.checkpoint` that applies `choices` in every layer."""
    return jaxmem.remat_policy(Assignment(others=choices))


def candidates(config: Config) -> Iterator[Candidate]:
    """Yields the policy that `config.remat` names, or the candidates of a search in its order."""
    name = config.remat.policy
    if name == "every_k":
        yield from every_kth(config)
    elif name == "estimator":
        yield from estimator(config)
    elif name in JAX_POLICIES:
        yield Candidate(JAX_POLICIES[name])
    else:
        yield Candidate(
            jaxmem.remat_policy(None)
            if name == "keep_everything"
            else policy_of(assignments(*tags_of(config.model))[name])
        )


def products(config: Config) -> dict[str, tuple[int, int]]:
    """Returns the sizes by which MaxText orders the results of a layer's products: the shape of the
    kernel, or for `attn` (sequence, width).
    """
    model, sequence, width = config.model, config.train.sequence, config.model.width
    if model.kind == "llama":
        shared, hidden = (width, model.shared_width), (width, model.hidden_width)
        first = {"q": (width, width), "k": shared, "v": shared, "gate": hidden, "up": hidden}
    else:
        first = {"qkv": (width, 3 * width), "up": (width, 4 * width)}
    return {"attn": (sequence, width)} | first | {"mid": (width, width)}


def every_kth(config: Config) -> Iterator[Candidate]:
    """Yields full recomputation of every k-th layer, as in FSDP's selective checkpointing. The
    number of recomputed layers grows from one.
    """
    layers = config.model.layers
    counts = dict.fromkeys(layers // count for count in range(1, layers + 1))
    for k in counts if config.remat.every_k is None else (config.remat.every_k,):
        yield Candidate(JAX_POLICIES["nothing_saveable"], k, {"every_k": k})


def estimator(config: Config) -> Iterator[Candidate]:
    """Yields the candidates of MaxText's search for a batch size: tensors are offloaded one by one,
    then recomputed one by one in the same order.

    The order depends only on the sizes of products, as in MaxText. A CPU cannot offload tensors.
    """
    sizes = products(config)
    order = sorted(sizes, key=lambda tag: [-size for size in sizes[tag]])
    offload = () if jax.default_backend() == "cpu" else (Action.OFFLOAD,)
    actions = dict.fromkeys(order, Action.KEEP)
    changes = [(tag, action) for action in (*offload, Action.RECOMPUTE) for tag in order]
    for tag, action in [(order[0], Action.KEEP), *changes]:
        actions[tag] = action
        found = {"actions": dict(actions)}
        yield Candidate(policy_of({t: Choice(a) for t, a in actions.items()}), found=found)

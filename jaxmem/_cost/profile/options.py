"""Lists the options of a tag, each with its bytes and with the work whose time is its price."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._core.actions import LOSSLESS, Action, Actions, Choice
from jaxmem._core.profile import Option, Profile, Tag
from jaxmem._cost.blocks.loops import Operation
from jaxmem._cost.blocks.opened_block import Opened
from jaxmem._cost.profile.jobs import Jobs, Untimed
from jaxmem._model.codecs import registry
from jaxmem._model.codecs.base import Codec
from jaxmem._model.codecs.mask import BitMask
from jaxmem._model.tags.primitive import tag_p
from jaxmem._model.tags.storage import Storage, codec_of
from jaxmem._trace.jaxpr import nbytes, per_device
from jaxmem._trace.job import Job
from jaxmem.errors import TagError


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The actions and the codecs that a plan may choose.

    actions: the actions for tags.
    named_values: the actions for values that `checkpoint_name` names; the author of such a value
      may not know of codecs.
    in_loops: the actions for tags inside loops of a block; the profile sets them.
    codecs: one codec, several codecs, a dict from kinds to codecs, or None for the codec of each
      kind.
    outliers: the counted outlier channels by block and tag. Codecs that separate outliers have
      capacity for this number.
    codecs_by_default: whether codecs are allowed only because the user named no actions. A lossy
      codec must then gain at least `MIN_GAIN_DEFAULT` of the step, else `MIN_GAIN_REQUESTED`.
    """

    actions: Sequence[Action] = ()
    named_values: Sequence[Action] = LOSSLESS
    in_loops: Sequence[Action] = ()
    codecs: Any = None
    outliers: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    codecs_by_default: bool = False

    def without_offload(self) -> "Allowed":
        """A copy without the actions that offload."""
        return dataclasses.replace(self, actions=[a for a in self.actions if not a.offloads])

    def open_to(self, tags: Sequence[Operation]) -> list[Action]:
        """The actions that are open to all of the tags."""
        named = any(tag.primitive != tag_p.name for tag in tags)
        in_loop = any(tag.in_loop for tag in tags)
        return [
            a
            for a in self.actions
            if (a in self.named_values or not named) and (a in self.in_loops or not in_loop)
        ]


def options_of(
    tags: Sequence[Operation], key: tuple, allowed: Allowed, jobs: Jobs, block: Opened
) -> list[tuple[Option, ...]]:
    """Returns the options of the tag name of `tags`, for each tag. An option is open to the name if
    every occurrence of the name can take it. The seconds of an option are `Untimed`.

    tags: the tags of this name, one for each occurrence.
    key: keeps the keys of the name's jobs apart from the keys of other names.
    allowed: the actions and codecs to choose from.
    jobs: collects the jobs of each option.
    block: the block of the tags.

    Raises TagError if two occurrences ask for different codecs.
    """
    forms = [
        (timed, choices)
        for timed, choices in _forms(tags, allowed, block.label)
        if all(_is_smaller(codec_of(choices[0]), tag) for tag in tags)
    ]

    def of_tag(tag: Operation, key: tuple) -> Iterator[Option]:
        aval, stack, shards = tag.aval, block.graph.instance.stack, block.shards // tag.devices
        stored = lambda aval: tag.turns * jobs.stored(aval, max(1, stack))
        work = lambda keys, times=1: [(k, times / shards) for k in keys]
        for timed, choices in forms:
            form, arrays, coding = codec_of(choices[0]), (aval,), []
            if form is not None and timed is not None:
                spec = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
                arrays = jax.eval_shape(form.encode, spec)
                keys = tuple((*key, str(timed), way) for way in ("encode", "decode"))
                # Default arguments, since the loop's variables are others when the job runs.
                decode = lambda *c, codec=timed: codec.decode(c, aval.shape, aval.dtype)
                jobs.by_key[keys[0]] = Job(timed.encode, (aval,))
                jobs.by_key[keys[1]] = Job(decode, tuple(jax.eval_shape(timed.encode, spec)))
                coding = work(keys, tag.turns)
            total = sum(map(stored, arrays))
            passes = jobs.keep(total, stack > 0)
            for choice in choices:
                moved = sum(stored(a) for a in arrays if Storage(choice).moves(a))
                # The tensor is also read for the transfer to host memory, and written after the
                # transfer back: one more pass than keeping takes.
                copies = work((*passes, passes[0])) if choice.action.offloads else []
                yield Option(
                    choice,
                    device_bytes=per_device(total - moved, shards),
                    host_bytes=per_device(moved, shards),
                    seconds=Untimed(coding + (copies or work(passes))),
                    host_seconds=Untimed(copies),
                )

    return [tuple(of_tag(tag, (*key, k))) for k, tag in enumerate(tags)]


def _forms(
    tags: Sequence[Operation], allowed: Allowed, label: str
) -> Iterator[tuple[Codec | None, list[Choice]]]:
    """The choices of a tag name in a block of this label, by the form of their stored arrays: the
    codec to time, or None for the tensor itself, and the choices of this form.

    The codec to time is the codec that was asked for, and the codec of the choices has room for the
    outliers that were counted. So another count takes no new measurements.
    """
    actions = allowed.open_to(tags)
    own: dict[Codec | None, list[Choice]] = {}
    for choice in (Choice(a) for a in Action if a in actions and a.stores and not a.names_codec):
        own.setdefault(codec_of(choice), []).append(choice)
    yield from own.items()
    if compressing := [a for a in actions if a.names_codec]:
        outliers = allowed.outliers.get(label, {}).get(tags[0].params["name"])
        for codec in codecs_of(tags, allowed.codecs):
            sized = codec if outliers is None else codec.with_room_for(outliers)
            yield codec, [Choice(a, str(sized)) for a in compressing]


def checked_outliers(outliers) -> dict[str, dict[str, int]]:
    """Counts of outlier channels as they were given to `jaxmem.plan`; none for None.

    Raises TagError for anything but whole numbers by block and tag.
    """
    whole = lambda n: isinstance(n, int) and not isinstance(n, bool) and n >= 0
    if outliers is None:
        return {}
    if isinstance(outliers, Mapping) and all(
        isinstance(tags, Mapping) and all(map(whole, tags.values())) for tags in outliers.values()
    ):
        return {str(block): dict(tags) for block, tags in outliers.items()}
    raise TagError(
        f"plan: `outliers` is {outliers!r}; expected numbers of channels by block label and tag,"
        ' such as {"block": {"ln1": 3}}'
    )


def checked_codecs(codecs) -> Any:
    """The argument `codecs` of `jaxmem.plan`: a list of codecs, a dict from kinds to such lists, or
    None.

    Raises TagError if `codecs` is no codec, no sequence of codecs, and no dict from kinds to these.
    """
    if codecs is None:
        return None
    try:
        if not isinstance(codecs, Mapping):
            return _listed(codecs)
        for kind in codecs:
            registry.default_for(kind)
        return {kind: _listed(chosen) for kind, chosen in codecs.items()}
    except TypeError:  # what is iterated over is no sequence
        raise TagError(
            f"plan: `codecs` is {codecs!r}; expected a codec such as 'grouped_symmetric', several"
            ' codecs, or a dict from kinds to codecs such as {"linear": "grouped_symmetric"}'
        ) from None


def _listed(chosen) -> list:
    """The codecs of one codec or of several codecs."""
    several = [chosen] if isinstance(chosen, str) or hasattr(chosen, "encode") else chosen
    return [registry.parse(str(codec)) for codec in several]


def _is_smaller(form: Codec | None, tag: Operation) -> bool:
    """Whether the codes of one tensor take less memory than the tensor itself. True for None, and
    False if the codec does not take the tensor.
    """
    aval = tag.aval
    if form is None:
        return True
    try:
        jax.eval_shape(form.encode, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return form.nbytes(aval.shape, aval.dtype) < nbytes(aval)
    except TagError:
        return False


def codecs_of(tags: Sequence[Operation], codecs) -> Iterable:
    """Returns the codecs that may compress a name: the codecs that at least one occurrence of
    the name may take. A plan chooses one of them for all occurrences.

    codecs: the argument `codecs` of `jaxmem.plan`: one codec, several codecs, a dict from kinds to
      codecs, or None.

    Raises TagError if two occurrences name different codecs.
    """
    own = {str(c) for tag in tags if (c := tag.params.get("codec")) is not None}
    if len(own) > 1:
        name = tags[0].params["name"]
        raise TagError(
            f"profile: tag {name!r} occurs {len(tags)} times in a block, with codecs"
            f" {' and '.join(sorted(own))}; one decision holds for all tags of a name: give them"
            " one codec, or names of their own"
        )
    given = [(t.params.get("kind"), t.params.get("codec"), t.aval.dtype) for t in tags]
    each = [codecs_for(*one, codecs) for one in given]
    # Every occurrence must accept a codec that takes tensors of two values only.
    return [
        c
        for c in dict.fromkeys(c for several in each for c in several)
        if not c.two_valued or all(c in several for several in each)
    ]


def codecs_for(kind: str | None, own: str | None, dtype, codecs) -> list:
    """The codecs that a tag may take: the tag's own codec, else the requested codecs, else the
    codec of its kind. A tag of the kind "exact" gets a codec only if `codecs` names that kind, or
    if the tensor is boolean, which a bit mask stores without loss.

    A requested codec for tensors of two values is for masks alone: it decodes other values to NaN.
    """
    if own is not None:
        return [registry.parse(own)]
    if isinstance(codecs, Mapping) and kind in codecs:
        chosen = codecs[kind]
    elif kind == registry.EXACT:
        return [BitMask()] if dtype == jnp.bool_ else []
    elif codecs is None or isinstance(codecs, Mapping):
        chosen = registry.default_for("mask" if dtype == jnp.bool_ else kind)
    else:
        chosen = codecs
    is_mask = kind == "mask" or dtype == jnp.bool_
    return [codec for codec in _listed(chosen) if is_mask or not codec.two_valued]


def recoded(profile: Profile, actions: Actions) -> tuple[Actions, int]:
    """Returns the assignment of an earlier plan with the codecs of this profile, whose capacity for
    outliers may differ; and the bytes that all layers save in addition because of the capacity.
    """
    found = {label: dict(choices) for label, choices in actions.items()}
    more = 0
    for block in profile.blocks:
        for tag in block.tags:
            choice = actions.get(block.name, {}).get(tag.name)
            if choice is None or (option := _other(tag, choice)) is None:
                continue
            found[block.name][tag.name] = option.choice
            if not option.choice.action.offloads:
                assert choice.codec is not None
                was = tag.turns * registry.parse(choice.codec).nbytes(tag.shape, tag.dtype)
                more += block.layers * (option.device_bytes - was // tag.shards)
    return found, more


def _other(tag: Tag, choice: Choice) -> Option | None:
    """The tag's option with the choice's action and codec, but another capacity for outliers. None
    if the tag has the choice itself as an option, or has no such option.
    """
    if choice.codec is None or any(o.choice == choice for o in tag.options):
        return None
    name = lambda codec: (codec or "").partition("(")[0]
    same = (o for o in tag.options if o.choice.action is choice.action)
    return next((o for o in same if name(o.choice.codec) == name(choice.codec)), None)

"""Lists the choices that are open to a tag, with the pieces of work whose times make up the price
of each.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._codecs import registry
from jaxmem._core.actions import KEEP, OFFLOAD, Action, Choice
from jaxmem._jax.jaxpr import FlatEquation, nbytes
from jaxmem._jax.job import Job
from jaxmem._profile.jobs import Jobs
from jaxmem._tags.tag import tag_p
from jaxmem.errors import TagError


@dataclasses.dataclass(frozen=True)
class UnpricedOption:
    """A choice whose time is not known yet.

    choice: the action and its codec.
    device_bytes, host_bytes: those of one layer, before a mesh divides them.
    jobs: keys of the jobs whose times add up to its price.
    """

    choice: Choice
    device_bytes: int
    host_bytes: int
    jobs: tuple[tuple, ...]


def options_of(
    equation: FlatEquation, aval, index: int, actions: Sequence[Action], codecs, jobs: Jobs
) -> tuple[UnpricedOption, ...]:
    """Returns the choices open to the tag that `equation` is.

    equation: the tag, of `jaxmem.tag` or `checkpoint_name`.
    aval: the tensor's shape and dtype.
    index: the number of the tag's block class, which keeps the keys of its jobs apart.
    actions, codecs: what `jaxmem.plan` was given.
    jobs: each choice's jobs are added to it.
    """
    size, found = nbytes(aval), []
    if Action.KEEP in actions:
        found.append(UnpricedOption(KEEP, size, 0, (jobs.keep(size),)))
    if Action.OFFLOAD in actions:  # written for the transfer, and read after it
        found.append(UnpricedOption(OFFLOAD, 0, size, (jobs.keep(size),) * 2))
    # checkpoint_name's values can be kept and offloaded by jax.checkpoint, but not encoded
    compressing = [a for a in actions if a.compresses and equation.eqn.primitive is tag_p]
    for codec in codecs_of(equation.eqn.params, aval, codecs) if compressing else ():
        try:
            codes = codec.nbytes(aval.shape, aval.dtype)
            encoded = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        except TagError:  # this codec does not take this tensor
            continue
        if codes >= size:  # the codes take as much as the tensor
            continue
        name = equation.eqn.params["name"]
        keys = tuple((index, name, str(codec), way) for way in ("encode", "decode"))
        # A default argument, since the loop's variable is another codec when the job runs.
        decode = lambda *c, codec=codec: codec.decode(c, aval.shape, aval.dtype)
        jobs.add(keys[0], Job(codec.encode, (aval,)))
        jobs.add(keys[1], Job(decode, tuple(encoded)))
        for action in compressing:
            choice, kept = Choice(action, str(codec)), jobs.keep(codes)
            if action.offloads:
                found.append(UnpricedOption(choice, 0, codes, (*keys, kept, kept)))
            else:
                found.append(UnpricedOption(choice, codes, 0, (*keys, kept)))
    return tuple(found)


def codecs_of(params: Mapping, aval, codecs) -> Iterable:
    """Returns the codecs that may compress a tag: its own, else those asked for, else its kind's.

    params: those of the tag's equation.
    aval: the tensor's shape and dtype.
    codecs: what `jaxmem.plan` was given: one codec, several, a dict by kind, or None.
    """
    kind = params.get("kind")
    if params.get("codec") is not None:
        return [registry.parse(params["codec"])]
    if isinstance(codecs, Mapping) and kind in codecs:
        chosen = codecs[kind]
    elif codecs is None or isinstance(codecs, Mapping):
        chosen = registry.default_for("mask" if aval.dtype == jnp.bool_ else kind)
    else:
        chosen = codecs
    several: Any = [chosen] if isinstance(chosen, str) or hasattr(chosen, "encode") else chosen
    return [registry.parse(str(c)) for c in several]

"""`jaxmem.tag`, which names a tensor of a block."""

from typing import Any

import jax.numpy as jnp

from jaxmem._model.codecs.registry import default_for, parse
from jaxmem._model.tags import primitive
from jaxmem._model.tags.implementation import is_hijax
from jaxmem.errors import TagError


def tag(x, name: str, *, kind: str | None = None, codec: str | None = None):
    """Names a tensor of a block, so that a plan can choose the tensor's action; returns `x`.

    Outside `jax.checkpoint`, a tag does not change the compiled program.

    x: an array of any shape and dtype.
    name: the tensor's name in plans. If a name tags several tensors of a block, one decision holds
      for all of them.
    kind: the kind of tensor, one of `jaxmem.codecs.KINDS`, which selects the codec. None selects
      the codec for tensors without a kind.
    codec: a codec, or its text form, which replaces the codec of the kind. None means the codec of
      the kind.

    Raises TagError if `x` is no array, if `name` is not a non-empty string or is "*", and if `kind`
    or `codec` is unknown.
    """
    params = tag_params(name, kind, codec)
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError):
        raise TagError(
            f"tag: `x` of the tag {name!r} is {type(x).__name__}; expected one array: tag each"
            " array of a tree under a name"
        ) from None
    return implementation().bind(x, **params)


def implementation() -> Any:
    """Returns the file that implements tags, for the options that are on."""
    if not is_hijax():
        return primitive
    # Remove with JAX 0.11: the import here, since JAX 0.11 lacks names that the file needs.
    from jaxmem._model.tags import hijax

    return hijax


def tag_params(name: str, kind: str | None, codec: str | None) -> dict:
    """Returns the parameters of a tag. Raises TagError as `tag` does."""
    check_name("tag", name)
    if kind is not None:
        default_for(kind)
    if codec is not None:
        codec = str(parse(str(codec)))
    return {"name": name, "kind": kind, "codec": codec}


def check_name(what: str, name) -> None:
    """Raises TagError if `name`, an argument of the function `what`, cannot be a tag's name."""
    if not isinstance(name, str) or not name or name == "*":
        raise TagError(
            f"{what}: `name` is {name!r}; expected a non-empty string other than '*', which plans"
            " call the tensor"
        )

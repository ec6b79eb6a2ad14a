"""Arguments that a step replaces and does not donate: what is held twice, said once."""

import collections

import jax

from jaxmem._core.bytes import show_bytes
from jaxmem._core.warn import warn
from jaxmem._jax.jaxpr import nbytes

NEGLIGIBLE = 0.01  # of the arguments' bytes: a scalar that happens to look like a result


def held_twice(traced: jax.stages.Traced) -> dict[str, int]:
    """Bytes by argument of what is not donated and has the shape and dtype of a result that no
    donated array can hold.
    """
    kind = lambda aval: (aval.shape, aval.dtype)
    results = collections.Counter(map(kind, traced.jaxpr.out_avals))
    infos = jax.tree.leaves_with_path(traced.args_info)
    arguments = list(zip(infos, traced.jaxpr.in_avals, strict=True))
    for (_, info), aval in arguments:
        if info.donated:
            results[kind(aval)] -= 1
    found: collections.Counter[str] = collections.Counter()
    for (path, info), aval in arguments:
        if not info.donated and results[kind(aval)] > 0:
            results[kind(aval)] -= 1
            found[jax.tree_util.keystr(path[1:2]).strip("[]'")] += nbytes(aval)
    return dict(found)


def warn_of_copies(traced: jax.stages.Traced, what: str) -> None:
    """A JaxmemWarning, naming the arguments, if a step holds much twice that it could update in
    place.
    """
    found = held_twice(traced)
    total = sum(found.values())
    if total <= NEGLIGIBLE * sum(map(nbytes, traced.jaxpr.in_avals)):
        return
    names = ", ".join(sorted(found))
    argnums = names if len(found) == 1 else f"({names})"
    warn(
        f"{what}: the step replaces {show_bytes(total)} of its argument"
        f"{'s' if len(found) > 1 else ''} {names} and does not donate them, so they are held twice;"
        f" jit it with donate_argnums={argnums}"
    )

"""Finds arguments that a step replaces and does not donate, which memory therefore holds twice."""

import collections

import jax

from jaxmem._core.bytes import show_bytes
from jaxmem._core.warn import warn
from jaxmem._trace.arguments import divisors
from jaxmem._trace.jaxpr import nbytes, per_device

# The share of the arguments' bytes up to which nothing is said: a scalar, for example, may happen
# to look like a result.
NEGLIGIBLE = 0.01


def held_twice(traced: jax.stages.Traced, args: tuple = ()) -> dict[str, int]:
    """Returns bytes on one device, by argument, of arrays that are not donated and have the shape
    and dtype of a result that no donated array can hold.

    traced: the step, as `jaxmem._trace.step.trace` returns JAX's stage of it.
    args: the arguments that the step was traced for, with their shardings.
    """
    # Results by shape and dtype: donated arguments take theirs first, and arguments that are not
    # donated then match the other results.
    kind = lambda aval: (aval.shape, aval.dtype)
    results = collections.Counter(map(kind, traced.jaxpr.out_avals))
    infos = jax.tree.leaves_with_path(traced.args_info)
    arguments = list(zip(infos, traced.jaxpr.in_avals, strict=True))
    results.subtract(kind(aval) for (_, info), aval in arguments if info.donated)
    found: collections.Counter[str] = collections.Counter()
    for ((path, info), aval), parts in zip(arguments, divisors(traced, args)):
        if not info.donated and results[kind(aval)] > 0:
            results[kind(aval)] -= 1
            # `args_info` is a pair of positional and keyword arguments, so that the second key of a
            # path is the argument's.
            found[jax.tree_util.keystr(path[1:2]).strip("[]'")] += per_device(
                nbytes(aval), parts or 1
            )
    return dict(found)


def warn_of_copies(traced: jax.stages.Traced, args: tuple, what: str) -> None:
    """Issues a JaxmemWarning that names the arguments if a step holds much twice that it could
    update in place.

    traced, args: as in `held_twice`.
    what: the public function that the message is from.
    """
    if any(getattr(jax.config, f"jax_debug_{values}") for values in ("nans", "infs")):
        return  # JAX donates nothing while it looks for such values
    parts = zip(traced.jaxpr.in_avals, divisors(traced, args))
    least = NEGLIGIBLE * sum(nbytes(aval) / (number or 1) for aval, number in parts)
    found = {name: size for name, size in held_twice(traced, args).items() if size > least}
    if not found:
        return
    total, names = sum(found.values()), ", ".join(sorted(found))
    # Keyword arguments have names; positional ones have numbers.
    numbers, words = [sorted(n for n in found if n.isdigit() is d) for d in (True, False)]
    donated = [f"donate_argnums={_listed(numbers)}"] if numbers else []
    donated += [f"donate_argnames={_listed(list(map(repr, words)))}"] if words else []
    warn(
        f"{what}: the step replaces {show_bytes(total)} of its argument"
        f"{'s' if len(found) > 1 else ''} {names} and does not donate them, so they are held twice;"
        f" jit it with {' and '.join(donated)} if the caller does not need them after the step, or"
        " give a step without jit all that it replaces as its first argument"
    )


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"({', '.join(items)})"

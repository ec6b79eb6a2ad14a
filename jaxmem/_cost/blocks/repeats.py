"""Counts how often a block's backward runs in a step, and for how many of these runs the saved
tensors are live at the same time.

If a block begins and ends in one iteration of an outer loop, its saved tensors are live in that
iteration alone. So microbatches that run one after the other count once. A streamed step, whose
last microbatch is a program of its own, has the same profile as a resident step.
"""

from collections.abc import Callable, Sequence

from jaxmem._model.tags.named import forward_names
from jaxmem._trace.jaxpr import Jaxpr, JaxprEqn, subjaxprs


def repeats(
    names: set[str], frames: Sequence[tuple[Jaxpr, int]]
) -> tuple[int, int | None, int, int]:
    """Returns the `layers`, `home`, `loops` and `runs` of an `Instance`, counted from the innermost
    loop outwards.

    `runs` takes every trip count, `layers` those of loops that only the backward is in: the forward
    ran before them in a loop of its own, so that all of its saved tensors are alive. A block
    without tags has no name by which to find its forward, and its loop over layers is told by
    running backward.

    names: the block's tags.
    frames: the jaxprs round the equation, outermost first, each with the trip count of the loop
      that leads on from it (1 where it is no loop).
    """
    layers, loops, runs, inside, home = 1, 0, 1, True, None
    jaxprs = [jaxpr for jaxpr, _ in frames]
    for depth in range(len(frames) - 1, -1, -1):
        length = frames[depth - 1][1] if depth else 1  # of the loop whose body this jaxpr is
        runs *= length
        if inside and (
            names & forward_names(jaxprs[depth]) or (not names and not _reversed(jaxprs, depth))
        ):
            inside = False  # the forward is in here too: outer loops do not multiply what is alive
        if inside:
            layers, loops = layers * length, loops + (length > 1)
        elif home is None and _in_loop(jaxprs, depth, lambda _: True):
            home = id(jaxprs[depth])
    return layers, home, loops, runs


def _reversed(jaxprs: Sequence[Jaxpr], depth: int) -> bool:
    """Whether the jaxpr at `depth` is the body of a scan that runs backward."""
    return _in_loop(jaxprs, depth, lambda e: bool(e.params.get("reverse")))


def _in_loop(jaxprs: Sequence[Jaxpr], depth: int, which: Callable[[JaxprEqn], bool]) -> bool:
    """Whether the jaxpr at `depth` is the body of such a loop."""
    loops = [e for e in jaxprs[depth - 1].eqns if e.primitive.name in ("scan", "while")]
    return depth > 0 and any(
        which(e) and any(inner is jaxprs[depth] for inner in subjaxprs(e)) for e in loops
    )

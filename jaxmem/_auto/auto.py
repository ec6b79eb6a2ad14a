"""`jaxmem.auto`: a loss whose layers become blocks, and their tensors tags, as they are found."""

import functools
import math
from collections.abc import Callable

from jaxmem._auto.calls import traced
from jaxmem._auto.find import Finder, read
from jaxmem._auto.graph import flops
from jaxmem._jax.rewrite import Node, Program, place_of
from jaxmem._tags.policy import decisions
from jaxmem.errors import StepError

_SHOWN = 3  # loops


def auto(function: Callable, plan=None) -> Callable:
    """`function` with its layers found and decided by `plan`, to be differentiated in its place.

    `jax.value_and_grad(jaxmem.auto(loss, plan))` needs no tag and no `jax.checkpoint` in the model:
    the loss is traced, its layers are found (each turn of a scan over layers, and the layers of a
    Python loop), and what is worth deciding in them is tagged. A `jax.checkpoint` of the user's own
    is taken away, since the plan decides in its place; blocks under a jaxmem policy, and tags, stay
    as they are.

    function: a loss, or one that returns more beside it, of arrays, modules and anything else. It
      may change Flax NNX modules.
    plan: a `jaxmem.Plan` or `jaxmem.plans.Assignment`; None returns `function` as it is, so that a
      plan's step is compared with the step as the user wrote it.

    Raises TagError if `plan` is no plan; when the function is called, StepError if no layer is
    found in it, with what was looked at, and TagError if the plan does not name a layer.
    """
    if not callable(function):
        raise StepError(
            f"auto: `function` is {type(function).__name__}; expected the loss, a function"
        )
    decided = decisions(plan)
    if plan is None:
        return function

    @functools.wraps(function)
    def rewritten(*args, **kwargs):
        call = traced(function, args, kwargs)
        program, finder = read(call.closed), Finder(decided)
        # What is inside a conditional or a shard_map is searched when that is traced: as it runs.
        results = finder.with_blocks(program).run(call.arrays)
        if not finder.found:
            raise _no_layers(function, program)
        return call.returned(results)

    return rewritten


def _no_layers(function: Callable, program: Program) -> StepError:
    """The error, with the largest loops and why each is none over layers."""
    name = getattr(function, "__name__", type(function).__name__)
    loops = [n for n in program.nodes if n.primitive in ("scan", "while")]
    largest = sorted(loops, key=_size, reverse=True)[:_SHOWN]
    looked_at = "; ".join(f"the {n.primitive} at {place_of(n)}: {_why(n)}" for n in largest)
    products = sum(flops(n) > 0 for n in program.nodes)
    rest = f"of {products} matrix products outside loops, no layers of equal operations repeat"
    return StepError(
        f"auto: no layer was found in {name!r} ({looked_at or 'it has no loop'}; {rest}). Layers"
        " are the turns of a jax.lax.scan, or equal ones after each other, that multiply matrices"
        " or convolve. Give auto the loss itself, not a step that differentiates it; or wrap a"
        " layer by hand: jax.checkpoint(layer, policy=jaxmem.remat_policy(plan))"
    )


def _size(node: Node) -> float:
    """FLOPs, or values where there are none: what makes a loop worth naming."""
    values = sum(math.prod(getattr(v.aval, "shape", ())) for v in node.eqn.outvars)
    return flops(node) or values * 1e-9


def _why(node: Node) -> str:
    if node.primitive == "while":
        return "a while loop has no derivative; a fori_loop of a known number of turns is a scan"
    if flops(node) == 0:
        return "its turns hold no matrix product"
    return "it has one turn" if node.eqn.params["length"] < 2 else "its blocks are planned already"

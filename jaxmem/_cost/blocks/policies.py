"""Checks the policies of a traced step: whether they come from the plan that `build` was given, and
whether jaxmem can find each of them.

Whether `build` passes its plan on is read from the policies of two traces: the trace under
`Assignment.nothing()` and the trace under `Assignment.unchanged()`. Both are made in any case: the
first is profiled, and the second may be compiled. A policy that occurs in both traces is one that
no plan reaches, in any block and for any cause. The alternative is to compare the two programs.
That is not needed, and a step without policies as it is written, as under `jaxmem.auto`, passes.
"""

import functools
from collections.abc import Callable, Iterable, Iterator

from jaxmem._core.warn import warn
from jaxmem._model.tags.combined import parts
from jaxmem._model.tags.named import is_block, is_tag, policies_of
from jaxmem._model.tags.policy import Policy
from jaxmem._trace.jaxpr import Jaxpr, JaxprEqn, equations, is_reference, line_of, subjaxprs
from jaxmem._trace.primitives import REMAT
from jaxmem.errors import StepError, TagError


def check_plan_is_passed_on(recomputed: Jaxpr, kept: Jaxpr) -> None:
    """Raises StepError if a block has the same policy under two plans that differ for every block.

    A step that has no policy at all as it is written, such as that of `jaxmem.auto`, passes.

    recomputed: the step traced with every tag recomputed, by `Assignment.nothing()`.
    kept: the step traced as it is written, by `Assignment.unchanged()`, where blocks under policies
      keep everything.
    """
    same = _policies(recomputed) & _policies(kept)
    if not same:
        return
    names = ", ".join(map(repr, sorted({policy.block for policy in same})))
    lines = _source_lines(e for e in _checkpoints(kept) if not same.isdisjoint(policies_of(e)))
    raise StepError(
        "plan: `build` does not pass its plan on to every block: it was called with a plan that"
        " recomputes every tag and with one that keeps everything, and blocks of label"
        f" {names} have the same policy in both steps, at {lines[0]}: {_cause(same)}. Expected"
        " policy=jaxmem.remat_policy(plan) with the plan that `build` is given, in a step that is"
        " made anew in each call; a block that is not to be planned takes no jaxmem policy. If a"
        " library wraps a class once and keeps the policy of its first model, as EasyDeL's"
        " auto_remat does, restore the class's own `__call__` in `build`, or make the model"
        " without checkpoints and plan jaxmem.auto(step)"
    )


def has_policies(jaxpr: Jaxpr) -> bool:
    """Whether a checkpoint has a policy of jaxmem."""
    return bool(_policies(jaxpr))


def own_checkpoints(jaxpr: Jaxpr) -> list[str]:
    """The user's files and lines of the checkpoints that have no policy of jaxmem."""
    return _source_lines(e for e in _checkpoints(jaxpr) if not is_block(e))


def saved_names(jaxpr: Jaxpr) -> set[str]:
    """Returns the names of the tags that are saved by policies with which blocks combine the plan's
    policy. The names are saved under every plan.
    """
    combined = (parts(e.params["policy"]) for e in _checkpoints(jaxpr) if is_block(e))
    others = [part for found in combined for part in found if not isinstance(part, Policy)]
    saves = lambda e: any(p(e.primitive, e.invars[0].aval, **e.params) is True for p in others)
    return {e.params["name"] for e in equations(jaxpr) if is_tag(e) and saves(e)}


def refuse_ambiguous(jaxpr: Jaxpr) -> None:
    """Raises TagError for a checkpoint whose jaxmem policy is hidden in a function, and for a
    checkpoint that combines several jaxmem policies. A block is found by its one jaxmem policy.
    """
    for eqn in _checkpoints(jaxpr):
        policies = policies_of(eqn)
        if len(policies) > 1:
            labels = ", ".join(sorted({repr(policy.block) for policy in policies}))
            raise TagError(
                "profile: the policy of a checkpoint combines several jaxmem policies, of the"
                f" labels {labels}; expected at most one, since one plan decides a block: give"
                " each block jaxmem.remat_policy(plan, block=...) once"
            )
        for other in parts(eqn.params.get("policy")):
            if not isinstance(other, Policy) and _holds_ours(other, set()):
                name = getattr(other, "__qualname__", type(other).__name__)
                raise TagError(
                    f"profile: the policy of a checkpoint is {name}, a function that calls"
                    " jaxmem.remat_policy(plan); then no plan can decide the block, and codes are"
                    " lost. Expected jaxmem.remat_policy(plan) itself, or"
                    " jax.checkpoint_policies.save_from_both_policies of it and another policy"
                )


_ONCE = "no_grad_no_remat"  # the kind of a reference that JAX writes in the forward alone


def warn_of_writes(jaxpr: Jaxpr) -> None:
    """Warns of blocks that write a `jax.Ref` from outside the block. JAX repeats the write where
    the backward recomputes the block, unless the reference is of the kind "no_grad_no_remat".
    """
    writing = [e for e in _checkpoints(jaxpr) if is_block(e) and _writes(e)]
    if writing:
        warn(
            f"plan: the block at {_source_lines(writing)[0]} writes a jax.Ref that is made outside"
            " of the block, and jax.checkpoint repeats the write in the backward, so that the value"
            " may depend on the plan; make the reference by jax.new_ref(value,"
            " kind='no_grad_no_remat'), or write it outside of the block"
        )


def _writes(block: JaxprEqn) -> bool:
    """Whether the backward repeats a write of the block to a reference from outside."""
    written = _written(block.params["jaxpr"])
    kinds = [getattr(v.aval, "kind", None) for v in block.invars]
    return any(is_reference(block.invars[i].aval) and kinds[i] != _ONCE for i in written)


def _written(jaxpr: Jaxpr) -> set[int]:
    """The positions of the inputs that are references, and that an equation of any depth writes."""
    written = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("swap", "addupdate"):
            written.add(eqn.invars[0])
        for inner in subjaxprs(eqn):
            # A call's operands are its body's inputs; a conditional has one more, first.
            pairs = zip(reversed(eqn.invars), reversed(range(len(inner.invars))))
            inside = _written(inner)
            written |= {v for v, i in pairs if i in inside and is_reference(v.aval)}
    return {i for i, v in enumerate(jaxpr.invars) if v in written}


def _cause(policies: set[Policy]) -> str:
    """What probably makes a policy the same under every plan."""
    choices = next(iter(sorted(policies, key=lambda p: p.block))).choices
    if choices is None:
        return (
            "it keeps everything, as remat_policy(None) does, or a step, a model or a class that an"
            " earlier build(None) made and that is cached"
        )
    if not choices:
        return (
            "it is the first call's, unless a fixed plan recomputes everything: the class, the"
            " model or the step is cached, by a library, by functools.cache, or by a jax.jit"
            " function made outside `build`, which keeps what it traced first although a global"
            " that it closes over changed"
        )
    told = ", ".join(f"{tag}: {choice}" for tag, choice in choices[:3])
    return f"it is of another plan than the given one ({told}{', ...' if len(choices) > 3 else ''})"


def _policies(jaxpr: Jaxpr) -> set[Policy]:
    """The jaxmem policies in a program."""
    return {policy for eqn in _checkpoints(jaxpr) for policy in policies_of(eqn)}


def _checkpoints(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The checkpoints in a program."""
    return (e for e in equations(jaxpr) if e.primitive.name in REMAT)


def _source_lines(checkpoints: Iterable[JaxprEqn]) -> list[str]:
    """The user's file and line of each checkpoint, without repetitions."""
    return list(dict.fromkeys(map(line_of, checkpoints)))


def _holds_ours(value, seen: set[int]) -> bool:
    """Whether a function is made of a jaxmem policy: in its closure, its defaults, or what a
    `functools.partial` binds.
    """
    if isinstance(value, Policy):
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    return any(_holds_ours(part, seen) for part in _parts(value))


def _parts(value) -> Iterator:
    """What a function or a collection refers to: closure, defaults, bound arguments, elements."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, Callable):
        yield getattr(value, "__self__", None)
        yield from getattr(value, "__defaults__", None) or ()
        yield from (getattr(value, "__kwdefaults__", None) or {}).values()
        for cell in getattr(value, "__closure__", None) or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a variable that was never assigned
                continue

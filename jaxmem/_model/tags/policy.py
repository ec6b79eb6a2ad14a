"""`jaxmem.remat_policy`: makes a plan into a `Policy`, which `jax.checkpoint` calls for every
operation of a block.

A policy that keeps everything saves no widened copy. A value that was converted to more bytes an
element is converted again. Otherwise the largest saved tensor of a GPT would be the float32 copy of
a bfloat16 softmax, in which the softmax's derivative computes.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import Offloadable

from jaxmem._core.actions import RECOMPUTE, Choice, is_whole
from jaxmem._core.assignment import Assignment, Decisions
from jaxmem._core.groups import group_label, span_of
from jaxmem._model.states import places
from jaxmem._model.tags.implementation import is_hijax, is_remat3
from jaxmem._model.tags.primitive import let_names_be_encoded, name_p, tag_p
from jaxmem._model.tags.storage import Storage
from jaxmem._model.tags.tag import implementation
from jaxmem.errors import TagError


@functools.cache
def _verdict(choice: Choice):
    """Returns a policy's answer for a tag with this choice: True keeps the tensor, and False
    recomputes it.

    JAX's own policies give the same answers, and `save_from_both_policies` accepts no others.
    """
    action = choice.action
    return Storage(choice) if action.encodes or action.offloads else action.stores


class Policy:
    """Decides for each operation of a block, when `jax.checkpoint` calls it: keep the result,
    recompute it, or store it in another form. It is hashable, since partial evaluation caches on
    the policy. It is no dataclass: libraries that hold policies in their configs make them plain
    data by `dataclasses.asdict`, which would replace a dataclass by a dict.

    block: the label of the block, or of the group of layers.
    choices: (tag name, choice) in the order of the names; a tag that is absent is recomputed. None
      keeps everything.
    layers: number of layers, if a plan may divide them into groups, as with `jaxmem.stack` and
      `jaxmem.auto`; 0 if it may not.
    loop: the label of the block that begins the iterations of the loop over the layers, if the loop
      can run layers in spans; "" if it cannot.
    """

    def __init__(
        self,
        block: str,
        choices: tuple[tuple[str, Choice], ...] | None = None,
        layers: int = 0,
        loop: str = "",
    ):
        self.block, self.choices, self.layers, self.loop = block, choices, layers, loop
        actions = {choice.action for _, choice in choices or ()}
        if any(action.encodes or action.offloads for action in actions):
            let_names_be_encoded()  # steps are read in traces with today's checkpoint
            implementation().let_names_be_encoded()

    @property
    def span(self) -> int:
        """Number of layers of a span, whose first input is saved through the step; 1 if each
        layer's input is saved.
        """
        return span_of(self.block)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        own = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({own})"

    def __call__(self, primitive, *avals, **params):
        check_remat3()
        choices = None if self.choices is None else dict(self.choices)
        if choices is None or is_whole(choices):
            refuse_remat3("to keep every tensor by a policy that was made before")
            unsaved = _widens(primitive, avals, params) or _is_complex(primitive, avals, params)
            return primitive is tag_p or not unsaved
        # Only tags and `checkpoint_name` have a name; results of other operations are never saved.
        choice = choices.get(params.get("name", ""), RECOMPUTE)
        if primitive is tag_p:
            return _verdict(choice)
        if primitive is not name_p:
            return False
        is_encoded = implementation().names_are_encoded()
        if choice.action.encodes and not is_encoded:
            raise TagError(
                f"remat_policy: checkpoint_name names a value {params['name']!r}, the plan says"
                f" {choice}, and the policy was made before the option jax_remat3 was turned on;"
                " expected a policy that is made after it: call remat_policy again"
            )
        if choice.action.stores and _is_complex(primitive, avals, params) and not is_encoded:
            raise TagError(
                f"remat_policy: checkpoint_name calls a value {params['name']!r} that is"
                f" {avals[0].dtype}, and the plan says {choice}; expected a real one, since"
                " jax.checkpoint stores no complex values: name it by jaxmem.tag, which stores both"
                " of its parts"
            )
        # `Offloadable` is JAX's own answer for offloading. Only a codec needs `Storage`, and the
        # rule that calls it.
        if choice.action.offloads and not choice.action.encodes:
            return Offloadable(src=places.DEVICE, dst=places.HOST)
        return _verdict(choice)


def _widens(primitive, avals, params) -> bool:
    """Whether an operation converts to a wider dtype. The narrower tensor has all information, and
    a second conversion costs next to nothing. Otherwise a softmax of bfloat16 whose derivative
    computes in float32 would also save the float32 copy.
    """
    if primitive.name != "convert_element_type":
        return False
    return avals[0].dtype.itemsize < params["new_dtype"].itemsize


# Operations from complex values to real values, and from real values to complex values.
_TO_REAL = ("real", "imag", "abs", "eq", "ne", "is_finite")
_TO_COMPLEX = ("complex", "eig")


def _is_complex(primitive, avals, params) -> bool:
    """Whether an operation's result is complex. `jax.checkpoint` cannot save complex values: it
    rounds saved values to their own precision, and JAX rounds only real values. A tag stores the
    real and the imaginary part.
    """
    name = primitive.name
    if name == "convert_element_type":
        return jnp.issubdtype(params["new_dtype"], jnp.complexfloating)
    if name == "fft":
        return params["fft_type"].name != "IRFFT"
    dtypes = (a.dtype for a in avals if hasattr(a, "dtype"))
    of_complex = any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)
    return name in _TO_COMPLEX or (of_complex and name not in _TO_REAL)


def check_remat3() -> None:
    """Raises TagError if JAX runs its next implementation of `jax.checkpoint` (`jax_remat3`), and
    is older than 0.12: then `jax.checkpoint` would silently recompute every tag.
    """
    # Remove with JAX 0.11: the function.
    if not is_hijax():
        refuse_remat3("to store a tag")


def refuse_remat3(purpose: str) -> None:
    """Raises TagError if JAX runs its next implementation of `jax.checkpoint`, under which jaxmem
    cannot fulfil the purpose. The purpose is an infinitive.
    """
    if is_remat3():
        raise TagError(
            f"remat_policy: the option jax_remat3 is on, and under it jaxmem is not able {purpose};"
            " turn it off: jax.config.update('jax_remat3', False)"
        )


def for_jax(policy: Policy) -> Callable:
    """Returns the policy as `jax.checkpoint` takes it.

    Under the option jax_remat3, JAX compares a policy with `everything_saveable` by identity, and
    asks no other policy about every operation. So `everything_saveable` replaces a policy that
    keeps every tensor. It saves widened copies too, and complex values.
    """
    if policy.choices is None and is_hijax():
        return jax.checkpoint_policies.everything_saveable
    return policy


def decisions(plan) -> Decisions:
    """Returns `plan` as an object that makes decisions; for None, one that keeps every tensor.

    Raises TagError for any other object.
    """
    if plan is None:
        return Assignment.everything()
    if not isinstance(plan, Decisions) or isinstance(plan, type):
        raise TagError(
            f"remat_policy: `plan` is {_named(plan)}; expected a jaxmem.Plan (jaxmem.Plan.load"
            " reads a file), a jaxmem.plans.Assignment or None (everything kept), or an object with"
            " their methods choices_for(block) and groups(block)"
        )
    return plan


def policy_for(decided: Decisions, label: str, *, layers: int = 0, loop: str = "") -> Policy:
    """Returns the policy of the block, or of the group of layers, with this label."""
    of_own = getattr(decided, "policy_for", None)  # an object for a trace may not be a plan
    if of_own is not None:
        return of_own(label, layers)
    choices = decided.choices_for(label)
    if is_whole(choices):  # one form, since partial evaluation caches on the policy
        return Policy(label, None, layers, loop)
    chosen = ((tag, Choice(c.action, c.codec)) for tag, c in choices.items())
    return Policy(label, tuple(sorted(chosen)), layers, loop)


def groups_of(plan, block: str, layers: int, loop: str = "") -> dict[range, Policy]:
    """Returns the groups into which a plan divides `layers` layers, in order, with the policy of
    each group. If the plan has one decision for all layers, they are one group.

    loop: as for `Policy`.

    Raises TagError if the plan's groups do not cover layers 0 to `layers`, each once, for layers in
    spans that the loop cannot run, and for a plan that `remat_policy` refuses.
    """
    check_remat3()
    decided = decisions(plan)
    found = decided.groups(block)
    if not found:
        return {range(layers): policy_for(decided, block, layers=layers, loop=loop)}
    # Each group must start at the end of the group before it, the first group at 0, and the last
    # group must stop at the last layer.
    ends = [0, *(stop for _, stop, *_ in found)]
    if [start for start, *_ in found] != ends[:-1] or ends[-1] != layers:
        raise TagError(
            "remat_policy: `plan` has groups of layers"
            f" {', '.join(group_label(block, *r) for r in found)}, and there are {layers} layers;"
            f" the groups must be layers 0 to {layers}, each once: plan this model anew"
        )
    for start, stop, *rest in found:
        _check_span(group_label(block, start, stop, *rest), stop - start, rest, bool(loop))
    policy_of = lambda label: policy_for(decided, label, layers=layers, loop=loop)
    return {range(*r[:2]): policy_of(group_label(block, *r)) for r in found}


def _check_span(label: str, layers: int, span: list[int], allowed: bool) -> None:
    """Raises TagError for layers in spans that a loop cannot run, and for a number of layers that
    no span has.

    span: the number of layers of a span, or nothing.
    """
    if not span:
        return
    if not 1 < span[0] < layers:
        raise TagError(
            f"remat_policy: `plan` decides {label!r}, in spans of {span[0]} layers; expected spans"
            f" of 2 to {layers - 1} layers, since the label names {layers} layers"
        )
    if not allowed:
        raise TagError(
            f"remat_policy: `plan` decides {label!r}, in spans of {span[0]} layers, and only the"
            " loops of jaxmem.stack, of jaxmem.released_step and of jaxmem.auto run layers in"
            " spans, if all layers are in one stack in device memory, or follow each other in a"
            " Python loop under jaxmem.auto; loop over the layers by one of these, or give the"
            " label without the spans"
        )


def remat_policy(
    plan, *, block: str | None = None, layer: tuple[int, int] | None = None
) -> Callable:
    """Makes a policy for `jax.checkpoint`, `flax.linen.remat` or `flax.nnx.remat` from a plan.

    plan: a `jaxmem.Plan` or a `jaxmem.plans.Assignment`. None keeps every tensor, tagged or not, as
      if the block had no checkpoint. `jax.checkpoint` cannot save complex values without a tag, so
      untagged complex values are recomputed in any case. Under JAX's option jax_remat3 the result
      is then JAX's own `everything_saveable`.
    block: the label of the block. Blocks with one label share their decisions. Use several labels
      if a plan should decide about several kinds of blocks separately. None means "block".
    layer: (i, L) for layer i, counted from 0, of L layers that a Python loop repeats. A plan may
      then decide about the first and the last layers separately. None means that all layers share
      one decision.

    Raises TagError for an argument of another type, and if the plan has no block of this label.
    Raises TagError also if the plan has separate decisions for groups of layers and `layer` is
    None, and if JAX's option jax_remat3 is on before JAX 0.12.
    """
    check_remat3()
    block = "block" if block is None else block
    if not isinstance(block, str) or not block:
        raise TagError(f"remat_policy: `block` is {block!r}; expected a non-empty string")
    if layer is None:
        return for_jax(policy_for(decisions(plan), block))
    if not _is_layer(layer):
        raise TagError(
            f"remat_policy: `layer` is {layer!r}; expected (i, L) for layer i of L layers, such as"
            " (0, 12) for the first of twelve"
        )
    number, layers = layer
    groups = groups_of(plan, block, layers)
    return for_jax(next(policy for group, policy in groups.items() if number in group))


_installed: set[str] = set()  # names of `jax.checkpoint_policies`


def install(plan, name: str = "jaxmem", *, block: str | None = None) -> Callable:
    """Sets `jax.checkpoint_policies.NAME` to the policy of a plan, and returns the policy.

    Libraries such as big_vision, simply and gemma look their policy up there by a name in a config.
    Call `install` in `build(plan)`, with the plan that `build` is given, and set the config to the
    name.

    plan, block: as for `remat_policy`.
    name: the name of the policy. A policy that an earlier call installed is replaced.

    Raises TagError for a name that is no identifier or that JAX's own policies have, and for the
    arguments that `remat_policy` refuses.
    """
    known = getattr(jax.checkpoint_policies, name, None) if isinstance(name, str) else None
    is_free = known is None or isinstance(known, Policy) or name in _installed
    if not (isinstance(name, str) and name.isidentifier() and is_free):
        raise TagError(
            f"install: `name` is {name!r}; expected an identifier that is no policy of"
            " jax.checkpoint_policies, such as 'jaxmem'"
        )
    policy = remat_policy(plan, block=block)
    setattr(jax.checkpoint_policies, name, policy)
    _installed.add(name)
    return policy


def _is_layer(layer) -> bool:
    if not isinstance(layer, tuple) or len(layer) != 2:
        return False
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in layer)
    return whole and 0 <= layer[0] < layer[1]


def _named(value) -> str:
    """Returns an error's words for a value of the wrong type."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__

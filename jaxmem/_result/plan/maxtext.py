"""A plan as flags of MaxText, whose remat policy `custom` decides named tensors of a layer.

A plan that these flags cannot express is refused. The alternative was to export the part that the
flags can express: MaxText would then train under another plan than the compiled one, in silence.
"""

from collections.abc import Collection
from typing import Any

from jaxmem._core.actions import KEEP, UNTAGGED, Action
from jaxmem._core.groups import ungrouped
from jaxmem.errors import TagError

# The tensors of the policy `custom` of MaxText 0.2.5. MaxText takes a flag `engram` too, and does
# not read it. `tests/stacks` compares these names with MaxText.
TENSORS = frozenset(
    {
        "attention_out", "context", "decoder_layer_input", "indexer_cutoff_threshold", "key_proj",
        "kv_proj", "kv_wa_proj", "mla_kv", "mla_q", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo",
        "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "moe_routing_maps", "moe_x_sorted", "out_proj",
        "qkv_proj", "query_proj", "query_wa_proj", "value_proj",
    }
)  # fmt: skip
# MaxText keeps the input of a layer on the device unless a flag says otherwise.
DEFAULTS = {"decoder_layer_input": "remat"}


def flags(plan: Any, names: Collection[str] | None = None) -> dict[str, str]:
    """Returns MaxText's flags for a plan; see `Plan.to_maxtext`."""
    known = TENSORS if names is None else frozenset(names)
    why = _obstacle(plan, known)
    if why is not None:
        raise TagError(f"Plan.to_maxtext: {why}")
    decided = {n: _location(c.action) for tags in plan.actions.values() for n, c in tags.items()}
    decided.pop(UNTAGGED, None)
    return {"remat_policy": "custom"} | {n: v for n, v in DEFAULTS.items() if n in known} | decided


def _location(action: Action) -> str:
    """The value of MaxText's flag for a tensor under an action that encodes nothing."""
    if not action.stores:
        return "remat"
    return "offload" if action.offloads else "device"


def _obstacle(plan: Any, known: frozenset[str]) -> str | None:
    """Why MaxText's flags cannot express a plan; None if they can."""
    if plan.places is not None or plan.divided is not None:
        return "the plan places or divides model states; expected decide=('actions',)"
    if not plan.actions:
        return (
            "the plan leaves the step as written; train with the flags that the step was planned"
            " with"
        )
    decided: dict[str, Any] = {}
    for label, tags in plan.actions.items():
        if ungrouped(label) != label:
            return (
                f"the plan decides groups of layers apart ({label!r}), and MaxText has one policy"
                " for all layers; run the plan by jaxmem.auto or jaxmem.remat_policy"
            )
        if tags.get(UNTAGGED) == KEEP:
            return (
                f"the plan runs block {label!r} without a checkpoint, and MaxText has no flag for"
                " this: its remat_policy=none recomputes every tensor, as remat_policy=full does;"
                " give a smaller budget, or run the plan by jaxmem.auto"
            )
        for name, choice in tags.items():
            if choice.action.encodes:
                return (
                    f"the plan compresses {name!r} ({choice}), and MaxText keeps, offloads or"
                    ' recomputes; plan with actions="lossless"'
                )
            if name != UNTAGGED and name not in known:
                return (
                    f"the plan decides {name!r} of block {label!r}, which is no tensor of the"
                    f" policy `custom` of MaxText: expected some of {', '.join(sorted(known))};"
                    " plan the names of MaxText by NNXDecoder.get_remat_policy"
                    " (docs/libraries.md), or give `names` if your MaxText has this tensor"
                )
            if decided.setdefault(name, choice) != choice:
                return (
                    f"the plan decides {name!r} differently in two blocks ({decided[name]} and"
                    f" {choice}), and MaxText has one policy for all layers; run the plan by"
                    " jaxmem.remat_policy"
                )
    return None

"""The memories in which a plan stores the model states of a stack's layers."""

import dataclasses
from typing import Any

DEVICE, HOST = "device", "pinned_host"
# The arrays that devices divide in addition to the batch: the values of `data_parallel`'s argument
# `divided`, and their descriptions.
DIVIDED_WORDS = {
    "nothing": "the batch alone",
    "moments": "the batch and moments (ZeRO-1)",
    "states": "all states, gathered as a minibatch starts",
    "layers": "all states, gathered a layer at a time (ZeRO-3)",
}
DIVIDED = tuple(DIVIDED_WORDS)


@dataclasses.dataclass(frozen=True)
class Places:
    """The number of layers whose model states are stored in each memory.

    Layers are counted in their order.

    layers: number of layers.
    persist: number of layers, the first ones, whose parameters and moments are stored in device
      memory.
    copies: number of layers after these whose parameters have a copy in device memory, in the dtype
      of compute. Their states are stored in host memory.
    buffers: number of layers, the last of the remaining ones, whose parameters stay on the device
      from the forward to the backward.
    outer_moments: the memory of the optimizer's arrays outside the layers, "device" or
      "pinned_host".
    """

    layers: int
    persist: int
    copies: int = 0
    buffers: int = 0
    outer_moments: str = DEVICE

    @property
    def streamed(self) -> int:
        """Number of layers that are neither resident nor have a copy."""
        return self.layers - self.persist - self.copies

    @property
    def resident(self) -> bool:
        """Whether all states are stored on the device."""
        return self.persist == self.layers and self.outer_moments == DEVICE

    @property
    def split(self) -> dict[str, Any]:
        """The arguments of a released step's `split`: name -> value."""
        fields = dataclasses.asdict(self)
        return {name: fields[name] for name in fields if name != "layers"}

    def __str__(self) -> str:
        """Returns text such as `3 of 48 layers on the device, 45 streamed from host memory`."""
        if self.resident:
            return f"all {self.layers} layers on the device"
        parts = [f"{self.persist} of {self.layers} layers on the device"]
        if self.copies:
            parts.append(f"{self.copies} with a copy there")
        if self.streamed:
            kept = f", {self.buffers} of them buffered" if self.buffers else ""
            parts.append(f"{self.streamed} streamed from host memory{kept}")
        if self.outer_moments == HOST:
            parts.append("moments outside the layers in host memory")
        return ", ".join(parts)

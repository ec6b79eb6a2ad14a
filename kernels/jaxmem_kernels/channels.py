"""Quantizes by what is known of channels, the indices of the last axis: their scales, or which of
them are stored as they are. Shapes are those of `layout`, with two parts.

An operation may be made of operations, if TPUs run one kernel and GPUs several. Its reference calls
the other operations, so that each lowers to its own kernel wherever no kernel does the whole. A
TPU's program that holds all values of some channels reads these values once. XLA gathers channels
out of a tensor only after a copy into another order of axes; a kernel that passes over the tensor
in any case needs no such copy.
"""

import functools

import jax.numpy as jnp

from jaxmem_kernels import checks
from jaxmem_kernels.dispatch import operation
from jaxmem_kernels.ops import quantize_by, quantize_without
from jaxmem_kernels.rounding import greatest, scale_of, wide_dtype
from jaxmem_kernels.typed import channels_of

composed = functools.partial(operation, kernel=None)


@composed
def quantize_channelwise(x, *, group: int, scale: str, stochastic: bool, seed: int = 0):
    """Quantizes symmetrically by one scale a channel (Adacc 3.2), and returns codes uint8 (*lead,
    K, H) and scales (W,).

    x: floating (*lead, W).
    group: how many values (an even number) of a row share bytes, half with half.
    scale: the scales' dtype, "bfloat16" or "float32".
    stochastic: whether to round at random and without bias.
    seed: which random numbers; read where rounding is stochastic.

    s = max|x| / 8 over all that a channel has, rounded up. Raises TypeError or ValueError for what
    it cannot take.
    """
    checks.tensor("quantize_channelwise", x)
    checks.group("quantize_channelwise", group, 2)
    checks.scale("quantize_channelwise", scale)
    # Codes are made by the scales that are stored, rounded up, and not by the exact ones.
    most = greatest(x.astype(wide_dtype(x.dtype)), tuple(range(x.ndim - 1)))
    scales = scale_of(most, scale, stochastic)
    return quantize_by(x, scales, group=group, stochastic=stochastic, seed=seed), scales


@composed
def quantize_separated(x, index, *, group: int, scale: str, stochastic: bool, seed: int = 0):
    """Takes some channels out of `x`, quantizes the rest as `quantize` does with zeros in their
    place, and returns codes uint8 (*lead, K, H), scales (*lead, K) and the values (*lead, S) of
    those channels, which are zeros in empty slots.

    x: floating (*lead, W).
    index: int32 (S,), the channel of each slot, and W where a slot is empty. No two slots have the
      same channel.
    group, scale, stochastic, seed: as for `quantize`. Raises TypeError or ValueError for what it
      cannot take.
    """
    checks.tensor("quantize_separated", x)
    checks.slots("quantize_separated", index)
    values = channels_of(x, index)
    taken = jnp.zeros(x.shape[-1], bool).at[index].set(True, mode="drop")
    how = {"group": group, "scale": scale, "stochastic": stochastic, "seed": seed}
    return (*quantize_without(x, taken, **how), values)

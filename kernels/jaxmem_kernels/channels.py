"""Quantizes with one scale for each channel, or with some channels stored exactly. A channel is an
index of the last axis. `layout` defines the shapes, with two parts.

Each operation here is one kernel on TPUs, and several operations on GPUs. The reference calls these
operations, so that each lowers to its own kernel if no kernel computes the whole. A TPU's program
that stores all values of some channels reads these values once. XLA gathers channels of a tensor
only after a copy into another order of axes. A kernel that reads the whole tensor needs no such
copy.
"""

import functools

import jax.numpy as jnp

from jaxmem_kernels import checks
from jaxmem_kernels.dispatch import operation
from jaxmem_kernels.layout import channels_of
from jaxmem_kernels.ops import quantize_by, quantize_without
from jaxmem_kernels.rounding import greatest, scale_of, wide_dtype

composed = functools.partial(operation, kernel=None)


@composed
def quantize_channelwise(x, *, group: int, scale: str, stochastic: bool, seed: int = 0):
    """Quantizes symmetrically by one scale a channel (Adacc 3.2), and returns codes uint8 (*lead,
    K, H) and scales (W,).

    x: floating (*lead, W).
    group: number of values (an even number) of a row whose two halves share bytes.
    scale: the scales' dtype, "bfloat16" or "float32".
    stochastic: whether rounding is stochastic and unbiased.
    seed: the seed of stochastic rounding.

    s = max|x| / 8 over all values of a channel, rounded up. Raises TypeError or ValueError for
    arguments that it does not support.
    """
    checks.tensor("quantize_channelwise", x)
    checks.group("quantize_channelwise", group, 2)
    checks.scale("quantize_channelwise", scale)
    # Values are quantized by the stored scales, which are rounded up.
    most = greatest(x.astype(wide_dtype(x.dtype)), tuple(range(x.ndim - 1)))
    scales = scale_of(most, scale, stochastic)
    return quantize_by(x, scales, group=group, stochastic=stochastic, seed=seed), scales


@composed
def quantize_separated(x, index, *, group: int, scale: str, stochastic: bool, seed: int = 0):
    """Separates some channels of `x`, and quantizes the other channels as `quantize` does, with
    zeros in place of the separated channels. Returns codes uint8 (*lead, K, H), scales (*lead, K)
    and the values (*lead, S) of the separated channels, with zeros in empty slots.

    x: floating (*lead, W).
    index: int32 (S,), the channel of each slot; W for an empty slot. Different slots have different
      channels.
    group, scale, stochastic, seed: as for `quantize`.

    Raises TypeError or ValueError for arguments that it does not support.
    """
    checks.tensor("quantize_separated", x)
    checks.slots("quantize_separated", index)
    values = channels_of(x, index)
    taken = jnp.zeros(x.shape[-1], bool).at[index].set(True, mode="drop")
    how = {"group": group, "scale": scale, "stochastic": stochastic, "seed": seed}
    return (*quantize_without(x, taken, **how), values)

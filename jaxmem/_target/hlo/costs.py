"""Sums up the costs of one execution of an optimized HLO module: its matrix products, their FLOPs
and XLA's own estimates of time, each as often as it runs.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable

from jaxmem._target.devices.rates import Rates
from jaxmem._target.hlo.links import Links
from jaxmem._target.hlo.products import arithmetic_seconds, flops_of, is_mispriced, product_seconds
from jaxmem._target.hlo.schedule import between_devices, waited, with_host
from jaxmem._target.hlo.text import HloModule, Instruction
from jaxmem_kernels.gpu.adapter import CUSTOM_CALLS

# XLA's estimates by each of its models, as JSON: [{"name": ..., "exec_time_us": ...}, ...].
_COST = re.compile(r'"reification_cost":(\[\{.*?\}\])')
_TRITON = re.compile(f'custom_call_target="(?:{"|".join(CUSTOM_CALLS)})"')
# XLA's estimates of kernels that are no products, corrected by the times of an H200. Where
# arithmetic takes longer than memory traffic, as for random bits, a kernel took this share of the
# estimate. Other estimates are at the datasheet's bandwidth, and a copy reached this share of it.
OF_ARITHMETIC, OF_BANDWIDTH, _ABOVE = 0.62, 0.86, 3.0
_TRITON_PRODUCT = re.compile(r'"kind":"__triton\w*_gemm\w*"')  # a fusion round matrix products


@dataclasses.dataclass(frozen=True)
class HloCosts:
    """What one execution of a module costs.

    matmul_flops: of its matrix products.
    matmuls: how many instructions are products: dots, library calls for them, convolutions.
    seconds: the sum of XLA's estimates, and of the waiting for other devices; None where the text
      has no estimate (compiled without cost statistics).
    arithmetic: seconds of the products at the device's rates, where these were given.
    host_seconds: the seconds of waiting for host memory, which `seconds` does not contain.
    """

    matmul_flops: int
    matmuls: int
    seconds: float | None
    arithmetic: float = 0.0
    host_seconds: float = 0.0


def hlo_costs(text: str, rates: Rates | None = None, links: Links | None = None) -> HloCosts:
    """Returns the costs of the module in `text` (`compiled.as_text()`, XLA:GPU or XLA:CPU).

    A loop counts its known trip count times (once where XLA does not know it), a conditional as its
    dearest branch. XLA rewrites some products (a matrix times a vector) into reductions, which are
    not counted. Opaque kernels (Triton, cuDNN attention) and copies have neither FLOPs nor an
    estimate.

    With `rates`, products that XLA misprices are priced by them: some of the libraries'
    (`is_mispriced`), and all in Triton's fusions, whose times XLA does not know before tuning.
    Triton kernels of ours are then priced as codecs: they read and write all that they are given,
    once. The seconds of waiting for host memory are at the rate of the host link.

    With `links`, the seconds in which the module waits for other devices are added.
    """
    module = HloModule(text)
    done: dict[str, HloCosts] = {}  # a computation that several instructions call is read once

    def cost(name: str, scheduled: bool) -> HloCosts:
        if name not in done:
            body = module.body(name)
            costs = [_instruction_cost(i, cost, rates) for i in body]
            if rates is not None and scheduled:
                kernels = [c.seconds for c in costs]
                devices = [between_devices(i, module, links) for i in body]
                host = [with_host(i, module, rates.link) for i in body]
                alone = waited(body, kernels, devices)
                both = waited(body, kernels, [d or h for d, h in zip(devices, host)])
                # The waiting for transfers between the computation's kernels.
                costs.append(HloCosts(0, 0, alone or None, host_seconds=both - alone))
            done[name] = _total(costs)
        return done[name]

    return cost(module.entry, True)


def _total(costs: list[HloCosts], times: int = 1) -> HloCosts:
    """The sum of `costs`, so many times; its seconds are None only if all of theirs are."""
    seconds = [c.seconds for c in costs if c.seconds is not None]
    return HloCosts(
        times * sum(c.matmul_flops for c in costs),
        times * sum(c.matmuls for c in costs),
        times * math.fsum(seconds) if seconds else None,
        times * math.fsum(c.arithmetic for c in costs),
        times * math.fsum(c.host_seconds for c in costs),
    )


def _instruction_cost(
    i: Instruction, cost: Callable[[str, bool], HloCosts], rates: Rates | None
) -> HloCosts:
    """Costs of one run of an instruction and its calls. `cost` returns a computation's costs; its
    second argument is whether the computation's instructions run one by one, unlike a fusion's.
    """
    if i.opcode == "while":
        return _total([cost(name, True) for name in i.runs], i.trips)
    if i.opcode == "conditional":
        branches = [cost(name, True) for name in i.called]
        return max(branches, key=lambda c: (c.seconds or 0.0, c.matmul_flops))
    inner = _total([cost(name, i.opcode == "call") for name in i.runs])
    flops, own = flops_of(i), _own_seconds(i.text)
    arithmetic = arithmetic_seconds(i, flops, rates) if rates and flops is not None else 0.0
    if rates and flops is not None and is_mispriced(i):
        # Results of a library call other than the product are its workspace.
        moved = sum(a.nbytes for a in (*i.operands, i.output))
        own = product_seconds(arithmetic, moved, rates)
    elif rates and own is not None and not inner.matmuls and flops is None:
        moving = i.nbytes / rates.bandwidth
        own = max(moving, OF_ARITHMETIC * own) if own > _ABOVE * moving else own / OF_BANDWIDTH
    if rates and _TRITON.search(i.text):
        own = i.nbytes / rates.codec
    # The greater of the two: XLA prices a library call that is wrapped in a slicing fusion at
    # nearly nothing, and the call inside properly.
    known = [s for s in (own, inner.seconds) if s is not None]
    seconds = max(known) if known else None
    if rates and _TRITON_PRODUCT.search(i.text):
        seconds = product_seconds(inner.arithmetic, i.nbytes, rates)
    return HloCosts(
        inner.matmul_flops + (flops or 0),
        inner.matmuls + (flops is not None),
        seconds,
        inner.arithmetic + arithmetic,
        inner.host_seconds,
    )


def _own_seconds(text: str) -> float | None:
    """XLA's own estimate for an instruction, None where its text has none."""
    if not (found := _COST.search(text)):
        return None
    microseconds = {c["name"]: c["exec_time_us"] for c in json.loads(found[1])}
    # "indexing-cost-model" is the model for Triton fusions, "sol" the speed-of-light one for all
    # else. The third, whose name is empty, knows no tensor cores.
    best = microseconds.get("indexing-cost-model", microseconds.get("sol"))
    return None if best is None else best * 1e-6

"""Reads the text of an optimized HLO module: its matrix products, their FLOPs and XLA's own
estimates of time, each as often as it runs.

The text is of computations, one instruction a line:

    ENTRY %main.3 (p: f32[8,4], q: f32[4,8]) -> f32[8,8] {
      ROOT %dot.2 = f32[8,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}, ...
    }
"""

import collections
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator

from jaxmem._device.rates import Rates

# A computation's first line: whether it is the entry, and its name.
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")  # its name, and the rest
_OPCODE = re.compile(r"[ )]([a-z][\w\-]*)\(")  # after the result's type
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")  # f32[8,4]: dtype and dimensions
_NAME = re.compile(r"%?([A-Za-z_][\w.\-]*)(?:,|$)")  # one of names between commas
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# XLA's estimates by each of its models, as JSON: [{"name": ..., "exec_time_us": ...}, ...].
_COST = re.compile(r'"reification_cost":(\[\{.*?\}\])')
# As a dot's attribute, or as JSON in the configuration of a library call.
_CONTRACTING = re.compile(r'lhs_contracting_dim(?:s=|ensions":)[{\[]([\d,"]*)[}\]]')
_TRITON = re.compile(r'custom_call_target="triton_kernel_call(?:_ffi)?"')  # _ffi: jax-triton 0.4
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")  # b01f_01io->b01f: the kernel's, here 01io
_MATMUL_CALLS = ("__cublas$", "__onednn$matmul")
_ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8}
_LIBRARY_EFFICIENCY = (
    0.79  # the greatest share of an H100's peak in XLA's own table of measured products
)


@dataclasses.dataclass(frozen=True)
class HloCosts:
    """What one execution of a module costs.

    matmul_flops: of its matrix products.
    matmuls: how many instructions are products: dots, library calls for them, convolutions.
    seconds: the sum of XLA's estimates, None where the text has none (compiled without cost
      statistics).
    """

    matmul_flops: int
    matmuls: int
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class _Array:
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES.get(self.dtype, 1)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    opcode: str
    output: _Array  # the first, where there are several
    operands: tuple[_Array, ...]
    text: str  # all that follows the instruction's name


def hlo_costs(text: str, rates: Rates | None = None) -> HloCosts:
    """Returns the costs of the module in `text` (`compiled.as_text()`, XLA:GPU or XLA:CPU).

    A loop counts its known trip count times (once where XLA does not know it), a conditional as its
    dearest branch. XLA rewrites some products (a matrix times a vector) into reductions, which are
    not counted. Opaque kernels (Triton, cuDNN attention) and copies have neither FLOPs nor an
    estimate.

    With `rates`, library calls that XLA misprices are priced by them. XLA's table knows no float16
    product and no bfloat16 one with a float32 result (its estimates are 8 and 64 times too slow),
    and takes cuDNN's convolutions for free. Triton kernels are then priced as codecs: they read and
    write all that they are given, once.
    """
    computations, entry = _parse(text)
    done: dict[str, HloCosts] = {}  # a computation that several instructions call is read once

    def cost(name: str) -> HloCosts:
        if name not in done:
            done[name] = _total(
                [_instruction_cost(i, cost, rates) for i in computations.get(name, [])]
            )
        return done[name]

    return cost(entry)


def _called(text: str) -> list[str]:
    """The computations that an instruction runs, each branch of a conditional among them."""
    branches = [_NAME.findall(group.replace(" ", "")) for group in _BRANCHES.findall(text)]
    return [*_CALLED.findall(text), *(name for group in branches for name in group)]


def executed(text: str, opcodes: tuple[str, ...]) -> dict[str, int]:
    """Returns how often instructions of each of these opcodes run in one execution of a module,
    those in loops times the known trip counts.
    """
    computations, entry = _parse(text)
    done: dict[str, collections.Counter] = {}

    def count(name: str) -> collections.Counter:
        if name not in done:
            total: collections.Counter = collections.Counter()
            for instruction in computations.get(name, []):
                total[instruction.opcode] += instruction.opcode in opcodes
                # What a loop calls runs once a trip; what others call, once.
                trips = (
                    m[1]
                    if instruction.opcode == "while" and (m := _TRIPS.search(instruction.text))
                    else 1
                )
                for called in _called(instruction.text):
                    total.update({opcode: int(trips) * n for opcode, n in count(called).items()})
            done[name] = total
        return done[name]

    return {opcode: count(entry)[opcode] for opcode in opcodes}


def _total(costs: list[HloCosts], times: int = 1) -> HloCosts:
    """The sum of `costs`, so many times; its seconds are None only if all of theirs are."""
    seconds = [c.seconds for c in costs if c.seconds is not None]
    return HloCosts(
        times * sum(c.matmul_flops for c in costs),
        times * sum(c.matmuls for c in costs),
        times * math.fsum(seconds) if seconds else None,
    )


def _instruction_cost(
    instruction: _Instruction, cost: Callable[[str], HloCosts], rates: Rates | None
) -> HloCosts:
    """Costs of one run of an instruction, with all that it calls; `cost` tells a computation's."""
    text, own = instruction.text, _own_seconds(instruction.text)
    if instruction.opcode == "while":
        trips = int(m[1]) if (m := _TRIPS.search(text)) else 1
        return _total([cost(name) for name in _CALLED.findall(text)], trips)
    if instruction.opcode == "conditional":
        return max(map(cost, _called(text)), key=lambda c: (c.seconds or 0.0, c.matmul_flops))
    inner = _total([cost(name) for name in _CALLED.findall(text)])  # what a fusion or call runs
    flops = _flops(instruction)
    if rates and flops is not None and _is_mispriced(instruction):
        own = _roofline(instruction, flops, rates)
    if rates and _TRITON.search(text):
        own = sum(a.nbytes for a in (*instruction.operands, instruction.output)) / rates.codec
    # The greater of the two: XLA prices a library call that is wrapped in a slicing fusion at
    # nearly nothing, and the call inside properly.
    priced = [s for s in (own, inner.seconds) if s is not None]
    return HloCosts(
        inner.matmul_flops + (flops or 0),
        inner.matmuls + (flops is not None),
        max(priced) if priced else None,
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


def _is_mispriced(i: _Instruction) -> bool:
    """Whether XLA's estimate of a product is one of those that `hlo_costs` calls wrong."""
    if "__cudnn$conv" in i.text:
        return True
    dtypes = (i.operands[0].dtype, i.output.dtype)
    return i.opcode == "custom-call" and dtypes[0] in ("bf16", "f16") and dtypes != ("bf16", "bf16")


def _roofline(i: _Instruction, flops: int, rates: Rates) -> float:
    """Seconds of a product by its arithmetic or by its memory traffic, whichever takes longer."""
    peak = rates.flops_f32 if i.operands[0].dtype == "f32" else rates.flops_16bit
    moved = sum(a.nbytes for a in (*i.operands, i.output))
    return max(flops / (_LIBRARY_EFFICIENCY * peak), moved / rates.bandwidth)


def _flops(i: _Instruction) -> int | None:
    """Returns the FLOPs of a matrix product, or None for an instruction that is none."""
    target = m[1] if (m := _TARGET.search(i.text)) else ""
    if i.opcode == "convolution" or target.startswith("__cudnn$conv"):
        return _convolution_flops(i, target)
    if i.opcode != "dot" and not (i.opcode == "custom-call" and target.startswith(_MATMUL_CALLS)):
        return None
    if m := _CONTRACTING.search(i.text):
        dims = [int(d) for d in re.findall(r"\d+", m[1])]
        return 2 * math.prod(i.output.shape) * math.prod(i.operands[0].shape[d] for d in dims)
    # The text of other library calls does not name the contracted dimensions. For [b,m,k] x [b,k,n]
    # the sizes of the three arrays multiply to (b m k)(b k n)(b m n) = b (b m k n)².
    batch = math.prod(i.output.shape[:-2])
    return 2 * math.isqrt(
        math.prod(math.prod(a.shape) for a in (*i.operands[:2], i.output)) // max(batch, 1)
    )


def _convolution_flops(i: _Instruction, target: str) -> int | None:
    """Returns 2 · outputs · kernel elements per output feature, for the forward convolution and for
    the two of its gradient alike.
    """
    if len(i.operands) < 2 or not (labels := _LABELS.search(i.text)):
        return None
    # `image` is what the forward convolution gives. A gradient with respect to the input reads its
    # cotangent, and so does one with respect to the filter, whose result is of the kernel's shape.
    image, kernel = i.output.shape, i.operands[1].shape
    if "BackwardInput" in target:
        image = i.operands[0].shape
    elif "BackwardFilter" in target:
        image, kernel = i.operands[1].shape, i.output.shape
    return 2 * math.prod(image) * math.prod(kernel) // kernel[labels[1].index("o")]


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Returns the instructions of each computation by its name, and the name of the entry."""
    computations: dict[str, list[_Instruction]] = {}
    entry = ""
    for is_entry, name, lines in _computations(text):
        arrays: dict[str, _Array] = {}  # results by name, since operands are given by name alone
        computations[name] = []
        for line in lines:
            if not (found := _INSTRUCTION.match(line)):
                continue
            instruction = _instruction(found[2], arrays)
            arrays[found[1]] = instruction.output
            computations[name].append(instruction)
        entry = name if is_entry else entry
    return computations, entry


def _computations(text: str) -> Iterator[tuple[bool, str, list[str]]]:
    """Yields for each computation whether it is the entry, its name, and its lines."""
    head, lines = None, []
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            head, lines = found, []
        elif line.startswith("}") and head:
            yield head[1] is not None, head[2], lines
            head = None
        else:
            lines.append(line)


def _instruction(body: str, arrays: dict[str, _Array]) -> _Instruction:
    """Reads what stands after `name = `; `arrays` are the results of the lines above."""
    first = _ARRAY.search(body)
    output = (
        _Array(first[1], tuple(int(d) for d in first[2].split(",") if d))
        if first
        else _Array("", ())
    )
    called = _OPCODE.search(body)
    if not called:
        return _Instruction("", output, (), body)
    # The operands' names end at the first closing parenthesis; attributes follow it.
    arguments = body[called.end() :].split(")", 1)[0].replace(" ", "")
    operands = tuple(arrays.get(name, _Array("", ())) for name in _NAME.findall(arguments))
    return _Instruction(called[1], output, operands, body)

"""How an optimized module for a GPU moves data between device and host memory: by DMA, or by
kernels that read and write host memory themselves; overlapped with matrix products, or alone.

XLA:GPU copies a slice of a stack by DMA if it knows the slice's offset in every iteration of the
loop. It writes the offset into the slicing operation's configuration, and nowhere else. A slice
without it becomes a kernel, which keeps multiprocessors waiting for the host's memory.

JAX pairs donated arguments with results of the same shape and dtype, in order. Where the memory of
one of them is unknown to JAX, it pairs all of them without comparing memories (jax 0.10.2 to
0.12.0.1): a result in device memory may then take the buffer of an argument in host memory.
"""

import dataclasses
import re
from collections.abc import Sequence

from jaxmem._target.hlo.origins import Origin, host_operand, origins, passed_on
from jaxmem._target.hlo.products import flops_of
from jaxmem._target.hlo.text import HOST, NOTHING, Array, HloModule, Instruction

_OFFSET_KNOWN = '"dynamic_slice_config"'
_SLICES = ("dynamic-slice", "dynamic-update-slice")
_COPIES = ("copy", "copy-start")
# These hand arrays on, and touch none of their elements.
_PASSED = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional")
_PASSED += ("opt-barrier", "async-update")
_ALLOCATES = 'custom_call_target="AllocateBuffer"'  # memory for a stack, which nothing fills
_OPERAND = re.compile(r"-done\(%?([\w.\-]+)")
# {3}: (1, {}, may-alias) where the module returns a tuple, {}: (1, {}, ...) where it does not
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_ALIASES = re.compile(r"input_output_alias=\{ (.*?) \}[,\n]")
_LAYOUT = re.compile(r"entry_computation_layout=\{\((.*?)\)->\(?(.*)")
_ARRAY = re.compile(r"(\w+\[[\d,<=]*\])(?:\{([^}]*)\})?")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One operation that reads or writes host memory.

    name: XLA's own, such as "dynamic-slice-start.3".
    op: the JAX operation that XLA's metadata names, "" for none.
    to_host: whether it writes host memory; else it reads it.
    how: "dma"; "kernel", which reads or writes host memory itself; "stack", a copy of an array
      within host memory.
    nbytes: bytes that one run of it moves.
    runs: how often it runs in one execution of the module; a loop's trips where XLA knows them.
    in_loop: whether it stands in a loop.
    products: how many matrix products start while it runs.
    argument: the argument in host memory that it reads or updates, as XLA's metadata names it; ""
      for memory that the module takes for itself.
    """

    name: str
    op: str
    to_host: bool
    how: str
    nbytes: int
    runs: int = 1
    in_loop: bool = False
    products: int = 0
    argument: str = ""


def transfers(text: str) -> tuple[Transfer, ...]:
    """Returns the transfers of the module in `text` (`compiled.as_text()` of XLA:GPU), in the order
    of its schedule, a loop's at the loop's position.
    """
    module = HloModule(text)
    if not any(a.host for i in module.named.values() for a in i.results):
        return ()

    def within(name: str, given: Sequence[Origin] | None, runs: int, in_loop: bool):
        """The transfers of a computation, and of the computations that it calls.

        given: where its parameters come from; None for the module's entry.
        """
        body = module.body(name)
        found = origins(body, given)
        # Whether each instruction is a matrix product, or contains one.
        products = [any(flops_of(e) is not None for e in (i, *module.within(i))) for i in body]
        done = {m[1]: at for at, i in enumerate(body) if (m := _OPERAND.search(i.text))}
        for at, i in enumerate(body):
            if i.opcode in ("while", "call", "conditional"):
                loop = in_loop or i.opcode == "while"
                for called, passed in zip(i.called, passed_on(i, found)):
                    yield from within(called, passed, runs * i.trips, loop)
            if (moved := host_transfer(i, module)) is None:
                continue
            beside = sum(products[at : done.get(i.name, at)])
            argument = host_operand(i, found)
            yield dataclasses.replace(
                moved, runs=runs, in_loop=in_loop, products=beside, argument=argument
            )

    return tuple(within(module.entry, None, 1, False))


def fault(found: tuple[Transfer, ...]) -> str | None:
    """Describes the fault of a module that copies arrays within host memory, or whose kernels read
    or write host memory in a loop. None for a module without such a fault.
    """
    copied = [t for t in found if t.how == "stack"]
    if copied:
        return (
            f"XLA copies {len(copied)} arrays within host memory, {copied[0].nbytes} bytes in"
            f" {copied[0].name} ({copied[0].op}), {copied[0].runs} times a step"
        )
    kernels = [t for t in found if t.how == "kernel" and t.in_loop]
    if kernels:
        verb = "writes" if kernels[0].to_host else "reads"
        return (
            f"XLA {verb} host memory by {len(kernels)} kernels in loops in place of copies:"
            f" {kernels[0].nbytes} bytes in {kernels[0].name} ({kernels[0].op}), {kernels[0].runs}"
            " times a step"
        )
    return None


def host_transfer(i: Instruction, module: HloModule) -> Transfer | None:
    """One run of an instruction that moves data to host memory or from it, alone; None for other
    instructions.
    """
    if i.opcode in _PASSED or i.opcode.endswith("-done") or _ALLOCATES in i.text:
        return None
    if i.opcode in _COPIES:
        # The results of copy-start are the destination, the source and a context.
        to, given = i.output, (*i.results[1:], *i.operands, NOTHING)[0]
        if not to.host and not given.host:
            return None
        how = "stack" if to.host and given.host else "dma"
        return Transfer(i.name, i.op, to.host, how, to.nbytes)
    inner = list(module.within(i)) or [i]
    reads = [a for e in inner if e.opcode == "parameter" for a in e.results if a.host]
    reads += [a for a in i.operands if a.host]
    writes = [a for e in inner if e.opcode != "parameter" for a in e.results if a.host]
    if not reads and not writes:
        return None
    slices = [e for e in inner if e.opcode in _SLICES]
    known = bool(slices) and all(_OFFSET_KNOWN in e.text for e in slices)
    how = "dma" if known else "kernel"
    return Transfer(i.name, i.op, bool(writes), how, _moved(slices, reads, writes))


def _moved(slices: list[Instruction], reads: list[Array], writes: list[Array]) -> int:
    """Bytes of a host transfer: of the slices if there are any, else of whole arrays."""
    if not slices:
        return sum(a.nbytes for a in writes or reads)
    # A slice that is read is the result; a slice that is written is the second operand.
    parts = (e.output if e.opcode == "dynamic-slice" else e.operands[1] for e in slices)
    return sum(a.nbytes for a in parts)


def misplaced(text: str) -> tuple[str, ...]:
    """Returns the types, such as "f32[6,256]", of results that share a buffer with an argument in
    another memory, host or device.

    text: the text of an optimized module, `compiled.as_text()`.
    """
    head = text.partition("\n")[0]
    pairs, layout = _ALIASES.search(head + "\n"), _LAYOUT.search(head)
    if pairs is None or layout is None:
        return ()
    arguments, results = (
        [(m[1], f"S({HOST})" in (m[2] or "")) for m in _ARRAY.finditer(side)]
        for side in (layout[1], layout[2])
    )
    found = ((int(m[1] or 0), int(m[2])) for m in _ALIAS.finditer(pairs[1]))
    return tuple(results[to][0] for to, of in found if results[to][1] != arguments[of][1])

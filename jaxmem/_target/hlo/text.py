"""Reads the text of an optimized HLO module, `compiled.as_text()`, into computations and their
instructions.

The text is of computations, one instruction a line:

    ENTRY %main.3 (p: f32[8,4], q: f32[4,8]) -> f32[8,8] {
      ROOT %dot.2 = f32[8,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}, ...
    }
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping

# A computation's first line: whether it is the entry, and its name.
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")  # its name, and the rest
_OPCODE = re.compile(r"[ )]([a-z][\w\-]*)\(")  # after the result's type
# f32[8,4]{1,0:T(8,128)S(5)}: dtype, dimensions and layout; memory space 5 is the host's
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
HOST = 5  # the memory space
_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"([\d,]*):T\(([\d,]+)\)")  # axes, and the outermost tile
# One of names between commas; newer compilers write an element of a tuple as %name#2.
_NAME = re.compile(r"%?([A-Za-z_][\w.\-]*)(?:#(\d+))?(?:,|$)")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"')
_OP = re.compile(r'op_name="([^"]*)"')
_PARAMETER = re.compile(r"\bparameter\((\d+)\)")
_ELEMENT = re.compile(r"get-tuple-element\(.*?\), index=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ITEM_BYTES = {"bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4} | {
    "f64": 8, "s64": 8, "u64": 8, "c64": 8, "c128": 16
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of a value; of a tuple's, where an instruction has several results, one of them.

    layout: as XLA writes it, such as "1,0:T(8,128)(2,1)S(1)": the axes with the minor one first, on
      a TPU the tiles that the array is padded to, and the memory space where it is not the device's
      own.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str = ""

    @property
    def nbytes(self) -> int:
        return self._sized(math.prod(self.shape))

    def _sized(self, count: int) -> int:
        """Bytes of so many numbers; of 4 bits, two share a byte."""
        if self.dtype in ("s4", "u4"):
            return -(-count // 2)
        return count * _ITEM_BYTES.get(self.dtype, 1)

    @property
    def tiled_bytes(self) -> int:
        """Bytes with the padding of the array's tiles."""
        if not (found := _TILE.match(self.layout)):
            return self.nbytes
        axes = [int(k) for k in found[1].split(",") if k]
        tile = [int(k) for k in found[2].split(",")]
        sides = [self.shape[k] for k in axes] + [1] * len(tile)  # the minor one first
        for k, least in enumerate(reversed(tile)):
            sides[k] = -(-sides[k] // least) * least
        return self._sized(math.prod(sides))

    @property
    def space(self) -> int:
        """The number of its memory space: 0 is the device's own."""
        return int(m[1]) if (m := _SPACE.search(self.layout)) else 0

    @property
    def host(self) -> bool:
        """Whether it is in host memory."""
        return self.space == HOST

    @property
    def on_core(self) -> bool:
        """Whether it is in memory of a core, on a TPU."""
        return self.space not in (0, HOST)


NOTHING = Array("", ())


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    name: XLA's name of it.
    opcode: XLA's name of the operation.
    results: the types of its results.
    operands: the types of its operands; for an operand with several results, of the first.
    operand_names: the names of the instructions that its operands are.
    text: all that follows the instruction's name.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[Array, ...]
    operand_names: tuple[str, ...]
    text: str

    @property
    def output(self) -> Array:
        """The first of its results."""
        return self.results[0] if self.results else NOTHING

    @property
    def nbytes(self) -> int:
        """Bytes that it reads and writes, if each operand and result is touched once."""
        return sum(a.nbytes for a in (*self.operands, *self.results))

    @property
    def trips(self) -> int:
        """The iterations of a loop; 1 if XLA does not know them, and for other instructions."""
        known = _TRIPS.search(self.text) if self.opcode == "while" else None
        return int(known[1]) if known else 1

    @property
    def op(self) -> str:
        """The JAX operation, or for a parameter the argument, that XLA's metadata names; "" for
        none.
        """
        return m[1] if (m := _OP.search(self.text)) else ""

    @property
    def parameter(self) -> int | None:
        """The number of the parameter that it is."""
        return int(m[1]) if (m := _PARAMETER.search(self.text)) else None

    @property
    def element(self) -> int | None:
        """The number of the element that it takes out of a tuple."""
        return int(m[1]) if (m := _ELEMENT.search(self.text)) else None

    @property
    def runs(self) -> list[str]:
        """The computations that it runs, but for the branches of a conditional by number."""
        return _CALLED.findall(self.text)

    @property
    def called(self) -> list[str]:
        """The computations that it runs, each branch of a conditional among them."""
        branches = [_NAME.findall(g.replace(" ", "")) for g in _BRANCHES.findall(self.text)]
        return [*self.runs, *(name for group in branches for name, _ in group)]


class HloModule:
    """The computations of a module, from its text.

    computations: the instructions of each computation, by its name.
    entry: the name of the computation that the module runs.
    """

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        for is_entry, name, lines in _computations(text):
            # Results by name, since operands are given by name alone.
            arrays: dict[str, tuple[Array, ...]] = {}
            body = self.computations[name] = []
            for line in lines:
                if not (found := _INSTRUCTION.match(line)):
                    continue
                instruction = _instruction(found[1], found[2], arrays)
                arrays[found[1]] = instruction.results
                body.append(instruction)
            self.entry = name if is_entry else self.entry

    @functools.cached_property
    def named(self) -> dict[str, Instruction]:
        """Every instruction by its name."""
        return {i.name: i for body in self.computations.values() for i in body}

    def body(self, name: str) -> list[Instruction]:
        """The instructions of a computation; none of a computation that the text lacks."""
        return self.computations.get(name, [])

    def run_by(self, i: Instruction) -> list[Instruction]:
        """The instructions of the computations that an instruction runs, but for the branches of a
        conditional by number.
        """
        return [j for name in i.runs for j in self.body(name)]

    def within(
        self, i: Instruction, enters: Callable[[Instruction], bool] = lambda i: True
    ) -> Iterator[Instruction]:
        """The instructions of the computations that an instruction calls, directly or through other
        calls, where `enters` allows.
        """
        for name in i.called:
            for j in self.body(name):
                yield j
                if enters(j):
                    yield from self.within(j, enters)

    def turns(self, loop: Instruction) -> int:
        """Returns the iterations of a loop: XLA's own count if it has one, else the constant to
        which the loop's counter rises, and 1 if there is no such constant.
        """
        found = re.search(r"condition=%?([\w.\-]+)", loop.text)
        condition = self.body(found[1]) if found else []
        root = condition[-1] if condition else None
        if loop.trips > 1 or root is None:
            return loop.trips
        if root.opcode in ("or", "and", "select", "fusion"):
            # On a TPU, a counter of 64 bits and its bound are two numbers of 32 bits each.
            bounds = (_whole(j) for j in (*condition, *self.run_by(root)))
            return max((n for n in bounds if n is not None), default=1)
        if root.opcode != "compare" or "direction=LT" not in root.text:
            return 1
        if len(root.operand_names) < 2:
            return 1
        counter, bound = (self.named.get(name) for name in root.operand_names[:2])
        own = re.search(r"compare\(%?[\w.\-]+#(\d+)", root.text)
        at = int(own[1]) if own else None if counter is None else counter.element
        stop = self._constant(bound)
        if stop is None:
            return 1
        start, step = 0, 1
        state = self._source(self.named.get(loop.operand_names[0])) if loop.operand_names else None
        body = self.body(loop.runs[0]) if loop.runs else []
        if at is not None and state is not None and state.opcode == "tuple":
            start = self._constant(self.named.get(state.operand_names[at])) or 0
        if at is not None and body and body[-1].opcode == "tuple":
            rise = self._source(self.named.get(body[-1].operand_names[at]))
            if rise is not None and rise.opcode == "add":
                parts = (self._constant(self.named.get(name)) for name in rise.operand_names)
                step = next((n for n in parts if n), 1)
        return max(1, -(-(stop - start) // step))

    def _constant(self, i: Instruction | None) -> int | None:
        """The whole number that an instruction is, or copies."""
        return _whole(self._source(i))

    def _source(self, i: Instruction | None) -> Instruction | None:
        """What an instruction copies, or itself."""
        return behind(("copy", "bitcast", "convert"), i, self.named)


def behind(
    views: Collection[str], i: Instruction | None, named: Mapping[str, Instruction]
) -> Instruction | None:
    """Returns the instruction that `i` is a view of, through all instructions with these opcodes;
    `i` itself if it is no view.
    """
    while i is not None and i.opcode in views and i.operand_names:
        i = named.get(i.operand_names[0])
    return i


def _whole(i: Instruction | None) -> int | None:
    """The value of a constant that is one whole number."""
    found = None if i is None else re.match(r"[su]\d+\[\]\S* constant\((-?\d+)\)", i.text)
    return int(found[1]) if found else None


def _computations(text: str) -> Iterator[tuple[bool, str, list[str]]]:
    """Yields for each computation whether it is the entry, its name, and its lines."""
    head, lines = None, []
    for line in _whole_lines(text):
        if found := _COMPUTATION.match(line):
            head, lines = found, []
        elif line.startswith("}") and head:
            yield head[1] is not None, head[2], lines
            head = None
        else:
            lines.append(line)


def _whole_lines(text: str) -> Iterator[str]:
    """Yields the instructions of a module, one a line. A kernel's metadata and a constant of
    several axes take several lines in the text; the last of these lines may begin as a computation
    ends.
    """
    rest = iter(text.splitlines())
    for line in rest:
        if line.count("{") == line.count("}") or not _INSTRUCTION.match(line):
            yield line
            continue
        parts, depth = [line], _opened(line)
        while depth > 0 and (more := next(rest, None)) is not None:
            parts.append(more)
            depth += _opened(more)
        yield " ".join(parts)


def _opened(line: str) -> int:
    """How many braces a line opens and does not close; those in quotes are text."""
    bare = _QUOTED.sub("", line)
    return bare.count("{") - bare.count("}")


def _instruction(name: str, body: str, arrays: dict[str, tuple[Array, ...]]) -> Instruction:
    """Reads what stands after `name = `; `arrays` are the results of the lines above."""
    called = _OPCODE.search(body)
    types = body[: called.start()] if called else body
    results = tuple(_array(*found) for found in _ARRAY.findall(types))
    if not called:
        return Instruction(name, "", results[:1], (), (), body)
    # The operands' names end at the first closing parenthesis; attributes follow it.
    arguments = body[called.end() :].split(")", 1)[0].replace(" ", "")
    given = _NAME.findall(arguments)
    operands = tuple(next(iter(arrays.get(one, ())[int(at or 0) :]), NOTHING) for one, at in given)
    return Instruction(name, called[1], results, operands, tuple(one for one, _ in given), body)


@functools.lru_cache(maxsize=2**12)  # a module has thousands of arrays of a few types
def _array(dtype: str, dims: str, layout: str) -> Array:
    return Array(dtype, tuple(int(d) for d in dims.split(",") if d), layout)

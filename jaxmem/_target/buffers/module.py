"""Reads XLA's optimized module from its serialized form, to find the instruction that computes a
value.

Only the fields of `HloModuleProto` that this needs are read. Their numbers are from
xla/service/hlo.proto and xla/xla_data.proto.
"""

import collections
import dataclasses

from jaxmem._target.buffers.proto import Message
from jaxmem._target.hlo.text import Array

_PRIMITIVE_TYPES = (  # xla.PrimitiveType, from 1
    "pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f16", "f32", "f64", "tuple",
    "opaque", "c64", "bf16", "token", "c128", "f8e5m2", "f8e4m3fn", "s4", "u4", "f8e4m3b11fnuz",
    "f8e5m2fnuz", "f8e4m3fnuz", "s2", "u2", "f8e4m3", "f8e3m4", "s1", "u1", "f4e2m1fn",
    "f8e8m0fnu",
)  # fmt: skip
# What these give is their first operand, in another form or at another position.
_VIEWS = ("bitcast", "copy", "reshape", "transpose", "convert", "reduce-precision")
_VIEWS += ("copy-start", "copy-done")

Position = tuple[int, tuple[int, ...]]  # an instruction's id, and an index into its result


@dataclasses.dataclass(frozen=True)
class ModuleInstruction:
    """One operation of the optimized module. Instructions and computations are named by their ids.

    name: XLA's own, such as "fusion.3".
    opcode: such as "fusion".
    op: the JAX operation that XLA's metadata names, "" for none.
    shape: the result's `ShapeProto`.
    operands: instructions.
    called: computations: a loop's body and condition, a fusion's own.
    parameter: which parameter of its computation it is, if its opcode is "parameter".
    element: which element it takes out of a tuple, if its opcode is "get-tuple-element".
    computation: the computation that contains it.
    """

    name: str
    opcode: str
    op: str
    shape: Message
    operands: tuple[int, ...]
    called: tuple[int, ...]
    parameter: int
    element: int
    computation: int


class Module:
    """The optimized module of an `HloModuleProto`, and where values in it come from.

    instructions: by id.
    roots: each computation's last instruction, which is its result.
    callers: the instructions that call each computation.
    parameters: the ids of the step's arguments.
    outputs: where each of the step's outputs is first at.
    """

    def __init__(self, message: Message):
        self.instructions: dict[int, ModuleInstruction] = {}
        self.roots: dict[int, int] = {}
        self.callers: dict[int, list[int]] = collections.defaultdict(list)
        self.entry = message.number(6)
        for computation in message.messages(3):  # id is 5, root_id 6, instructions 2
            number = computation.number(5)
            self.roots[number] = computation.number(6)
            for found in computation.messages(2):
                made = ModuleInstruction(
                    name=found.text(1),
                    opcode=found.text(2),
                    op=found.message(7).text(2),
                    shape=found.message(3),
                    operands=tuple(found.numbers(36)),
                    called=tuple(found.numbers(38)),
                    parameter=found.number(9),
                    element=found.number(13),
                    computation=number,
                )
                self.instructions[found.number(35)] = made
                for called in made.called:
                    self.callers[called].append(found.number(35))
        is_of_entry = lambda i: i.opcode == "parameter" and i.computation == self.entry
        self.parameters = {at for at, i in self.instructions.items() if is_of_entry(i)}
        self.by_name = {i.name: at for at, i in self.instructions.items()}
        root = self.instructions.get(self.roots.get(self.entry, 0))
        # JAX's programs return a tuple: its operands are the outputs.
        outputs = root.operands if root is not None and root.opcode == "tuple" else ()
        self.outputs: list[Position] = [self._handed_on(o, ()) for o in outputs]
        # By position: the loops whose initial state contains the value at this position.
        self._readers: dict[Position, list[int]] = collections.defaultdict(list)
        for at, i in self.instructions.items():
            init = (  # a loop's one operand is the tuple of its initial state
                self.instructions.get(i.operands[0]) if i.opcode == "while" and i.operands else None
            )
            if init is not None and init.opcode == "tuple":
                for operand in init.operands:
                    self._readers[self._handed_on(operand, ())].append(at)

    def array(self, position: Position) -> Array:
        """Returns the type of a value, with the layout's memory space alone."""
        shape = self.instructions[position[0]].shape
        for i in position[1]:  # ShapeProto: the shapes of a tuple's elements are field 4
            shape = list(shape.messages(4))[i]
        kind = shape.number(2)  # element_type; 3 are the dimensions
        known = 0 < kind <= len(_PRIMITIVE_TYPES)
        dtype = _PRIMITIVE_TYPES[kind - 1] if known else f"type{kind}"
        # Field 5 is the layout, whose field 8 is the memory space.
        return Array(dtype, tuple(shape.numbers(3)), f"S({shape.message(5).number(8)})")

    def loops(self, at: int) -> list[str]:
        """Returns the names of the loops round an instruction, innermost first."""
        found: list[int] = []
        # Of several callers the first stands for all. No chain is longer than the module, unless
        # the file is damaged and the chain is a circle.
        callers = self.callers[self.instructions[at].computation][:1]
        while callers and len(found) < len(self.instructions):
            found += callers
            callers = self.callers[self.instructions[callers[0]].computation][:1]
        return [self.instructions[i].name for i in found if self.instructions[i].opcode == "while"]

    def handed_on(self, position: Position) -> list[str]:
        """Returns the names of the loops that carry the value at `position` from one iteration to
        the next, or that start with it.
        """
        at, index = self._handed_on(*position)
        here = self.instructions[at]
        # It is a loop's result, or within the body a part of the loop's state.
        own = [at] if here.opcode == "while" else []
        if here.opcode == "parameter":
            own = self.callers[here.computation]
        found = [*own, *self._readers.get((at, index), [])]
        return [self.instructions[i].name for i in found if self.instructions[i].opcode == "while"]

    def origins(self, position: Position) -> list[ModuleInstruction]:
        """Returns the instructions that compute the value at `position`. For a stack that a loop
        writes, these are the instructions that compute the stacked values.
        """
        found: dict[int, ModuleInstruction] = {}
        seen, todo = set(), [position]
        while todo:
            position = todo.pop()
            if position in seen or position[0] not in self.instructions:
                continue
            seen.add(position)
            before = self._before(*position)
            if before is None:
                found[position[0]] = self.instructions[position[0]]
            else:
                todo += before
        return list(found.values())

    def _before(self, at: int, index: tuple[int, ...]) -> list[Position] | None:
        """Returns the positions that the value comes from; None if the instruction computes it."""
        i = self.instructions[at]
        if i.opcode == "while":
            # The body's root is the next iteration's state, a tuple. The condition's is no tuple.
            roots = (self.roots[c] for c in i.called)
            bodies = [root for root in roots if self.instructions[root].opcode == "tuple"]
            return [(root, index) for root in bodies] if index else None
        if i.opcode == "parameter" and i.computation != self.entry:
            return [self._argument(c, i.parameter, index) for c in self.callers[i.computation]]
        if i.opcode == "dynamic-update-slice":  # the origin is the value written
            return [(i.operands[1], ())]
        if i.opcode == "async-start" and i.called:  # its result is (operands, result, ...)
            return [(self.roots[i.called[0]], index[1:])]
        if i.opcode in ("async-done", "async-update"):
            return [(i.operands[0], (1, *index))]
        if i.opcode in ("fusion", "call") and i.called:
            return [(self.roots[i.called[0]], index)]
        passed = self._passed(i, index)
        return None if passed is None else [passed]

    def _argument(self, at: int, number: int, index: tuple[int, ...]) -> Position:
        """Returns where parameter `number` of a computation comes from that the instruction with
        the id `at` calls.

        For a loop that is the loop itself, whose state `_before` looks for in the body's root.
        """
        caller = self.instructions[at]
        if caller.opcode == "while" or number >= len(caller.operands):
            return at, index
        return caller.operands[number], index

    def _passed(self, i: ModuleInstruction, index: tuple[int, ...]) -> Position | None:
        """Returns the position whose value the instruction passes on, None if it makes its own."""
        if i.opcode == "get-tuple-element":
            return i.operands[0], (i.element, *index)
        if i.opcode == "copy-done" and i.operands:  # a TPU moves arrays into its cores so, and out
            return i.operands[0], (0, *index)
        if i.opcode == "copy-start" and i.operands and index[:1] == (0,):  # (copy, source, ...)
            return i.operands[0], index[1:]
        if i.opcode == "tuple":
            return (
                (i.operands[index[0]], index[1:]) if index and index[0] < len(i.operands) else None
            )
        return (i.operands[0], index) if i.opcode in _VIEWS and i.operands else None

    def _handed_on(self, at: int, index: tuple[int, ...]) -> Position:
        """Returns the position that a value is first at, before tuples, views and copies."""
        # Bounded, since a damaged file may refer in circles.
        for _ in self.instructions:
            if (before := self._passed(self.instructions[at], index)) is None:
                break
            at, index = before
        return at, index

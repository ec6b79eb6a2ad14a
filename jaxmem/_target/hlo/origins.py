"""Follows arrays in host memory back to the arguments of the module, through loops and in-place
updates.

A transfer is named after the argument that its array in host memory comes from. The alternative is
XLA's name of the operation. XLA names the operation after the loop around it, and that name is the
same for all arrays of a layer.
"""

from collections.abc import Sequence

from jaxmem._target.hlo.text import Instruction

# An argument's name, as XLA's metadata has it; "" for an array that is no argument; for a tuple,
# the names of its elements.
Origin = str | tuple["Origin", ...]


def origins(body: Sequence[Instruction], given: Sequence[Origin] | None) -> dict[str, Origin]:
    """Returns the origin of each of a computation's instructions, by its name.

    given: the origins of the computation's parameters; None for a module's entry.
    """
    found: dict[str, Origin] = {}
    for i in body:
        found[i.name] = _origin(i, found, given)
    return found


def passed_on(i: Instruction, found: dict[str, Origin]) -> list[list[Origin]]:
    """The origins of the parameters of each computation that a loop, a call or a conditional runs,
    in the order of `i.called`.
    """
    operands = [found.get(name, "") for name in i.operand_names]
    if i.opcode != "conditional":
        return [operands for _ in i.called]
    return [[one] for one in operands[1:]]  # the first says which branch


def host_operand(i: Instruction, found: dict[str, Origin]) -> str:
    """The first argument among an instruction's operands in host memory, "" where none is."""
    named = (_first(found.get(name, "")) for name, a in zip(i.operand_names, i.operands) if a.host)
    return next(filter(None, named), "")


def _origin(i: Instruction, found: dict[str, Origin], given: Sequence[Origin] | None) -> Origin:
    """The argument that an instruction's result is a part of, "" where there is none.

    found: the origins of earlier instructions.
    given: the origins of a called computation's parameters; None for the whole program.
    """
    operands = [found.get(name, "") for name in i.operand_names]
    if i.opcode == "parameter":
        if given is None:
            return i.op
        number = i.parameter or 0
        return given[number] if number < len(given) else ""
    if i.opcode == "tuple":
        return tuple(operands)
    if i.opcode == "get-tuple-element" and operands:
        (whole,), at = operands, i.element or 0
        if isinstance(whole, str):
            return whole
        return whole[at] if at < len(whole) else ""
    if i.opcode in ("while", "opt-barrier") and operands:
        return operands[0]  # a carried value keeps its index
    # Every other instruction that returns an array in host memory has updated it there.
    return host_operand(i, found) if any(a.host for a in i.results) else ""


def _first(origin: Origin) -> str:
    """The first name in an origin."""
    if isinstance(origin, str):
        return origin
    return next(filter(None, map(_first, origin)), "")

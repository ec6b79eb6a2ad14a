"""Counts the instructions that one execution of a compiled module, or of a traced program, runs."""

import collections

from jaxmem._target.hlo.text import HloModule


def executed(text: str, opcodes: tuple[str, ...]) -> dict[str, int]:
    """Returns the number of instructions of each opcode in one execution of a module. Instructions
    in loops count once for each of the known trips.
    """
    module = HloModule(text)
    done: dict[str, collections.Counter] = {}

    def count(name: str) -> collections.Counter:
        if name not in done:
            total: collections.Counter = collections.Counter()
            for instruction in module.body(name):
                total[instruction.opcode] += instruction.opcode in opcodes
                # A loop's computations run once for each trip; other computations run once.
                for called in instruction.called:
                    inside = count(called).items()
                    total.update({opcode: instruction.trips * n for opcode, n in inside})
            done[name] = total
        return done[name]

    return {opcode: count(module.entry)[opcode] for opcode in opcodes}


def runs(jaxpr, primitive: str) -> int:
    """Returns how often a traced program runs a primitive. A scan counts by its length."""
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.primitive.name == primitive
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inner = (getattr(value, "jaxpr", value) for value in eqn.params.values())
        total += trips * sum(runs(one, primitive) for one in inner if hasattr(one, "eqns"))
    return total

"""The buffer assignment of a hand-made program, encoded here by the wire format's rules, and what
is no such message.
"""

import dataclasses
import json
import random

import pytest

from jaxmem._target.buffers.held_buffers import POINTS, Peak
from jaxmem._target.buffers.peak import peak
from jaxmem._target.buffers.proto import Message
from jaxmem.errors import StepError

pytestmark = pytest.mark.core

F32 = 11
ENTRY, BODY = 1, 2


def varint(value: int) -> bytes:
    groups = [value >> s & 127 for s in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(g | 128 for g in groups[:-1]), groups[-1]])


def encode(**fields) -> bytes:
    """`_3=...`: an int as a number, bytes or str as they are, a list once for each, a tuple of
    numbers packed.
    """
    out = b""
    for name, values in fields.items():
        for value in values if isinstance(values, list) else [values]:
            number = int(name[1:])
            if isinstance(value, int):
                out += varint(number << 3) + varint(value)
                continue
            data = b"".join(map(varint, value)) if isinstance(value, tuple) else value
            data = data.encode() if isinstance(data, str) else data
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return out


def shape(dtype=F32, dims=(256,), space=0) -> bytes:
    return encode(_2=dtype, _3=tuple(dims), _5=encode(_8=space))


def instruction(
    at, name, opcode, *, op="", of=None, operands=(), called=(), parameter=0, element=0
) -> bytes:
    of = shape() if of is None else of
    own = {"_7": encode(_2=op), "_9": parameter, "_13": element}
    return encode(_1=name, _2=opcode, _3=of, **own, _35=at, _36=operands, _38=called)


def buffer(number, at, *, size=1024, index=()) -> bytes:
    return encode(_1=number, _2=size, _3=encode(_4=at, _3=tuple(index)))


def allocation(number, size, *slices, **flags) -> bytes:
    return encode(_1=number, _2=size, **flags, _9=[encode(_1=b, _2=o, _3=s) for b, o, s in slices])


def event(kind, number, instruction, share=0) -> bytes:
    return encode(_1=kind, _2=number, _4=instruction, _5=share)


def sequence(computation, *instructions) -> bytes:
    return encode(_1=computation, _2=encode(_1=instructions))


def program(*more: tuple[list[bytes], bytes, bytes]) -> bytes:
    """p -> a loop that stacks tanh(p) in place, from zeros -> out; `early` dies before `late` is
    made.

    more: buffers, their allocation and their trace, beside the program's own.
    """
    stack = shape(dims=(2, 256))
    pair = encode(_2=13, _4=[stack, shape()])
    entry = [
        instruction(10, "p", "parameter", op="params['w']"),
        instruction(11, "zeros", "broadcast", op="jit(f)/zeros", of=stack),
        instruction(12, "init", "tuple", of=pair, operands=(11, 10)),
        instruction(
            13, "loop", "while", op="jit(f)/while", of=pair, operands=(12,), called=(BODY,)
        ),
        instruction(14, "stack", "get-tuple-element", of=stack, operands=(13,), element=0),
        instruction(15, "early", "add", op="jit(f)/early"),
        instruction(16, "late", "multiply", op="jit(f)/late", operands=(14,)),
        instruction(17, "out", "negate", op="jit(f)/neg", operands=(16,)),
        instruction(18, "results", "tuple", of=pair, operands=(10, 17)),
    ]
    body = [
        instruction(20, "state", "parameter", of=pair),
        instruction(21, "so_far", "get-tuple-element", of=stack, operands=(20,), element=0),
        instruction(22, "one", "tanh", op="jit(f)/while/body/tanh"),
        instruction(23, "cast", "bitcast", operands=(22,)),
        instruction(
            24,
            "put",
            "dynamic-update-slice",
            op="jit(f)/while/body/put",
            of=stack,
            operands=(21, 23),
        ),
        instruction(25, "next", "tuple", of=pair, operands=(24, 22)),
    ]
    module = encode(
        _3=[
            encode(_1="main", _2=entry, _5=ENTRY, _6=18),
            encode(_1="body", _2=body, _5=BODY, _6=25),
        ],
        _6=ENTRY,
        _7=encode(
            _1=[sequence(ENTRY, 10, 15, 11, 12, 13, 14, 16, 17, 18), sequence(BODY, *range(20, 26))]
        ),
    )
    buffers = [
        buffer(1, 10),
        buffer(2, 11, size=2048),
        buffer(3, 13, size=2048, index=(0,)),
        buffer(4, 15),
        buffer(5, 16),
        buffer(6, 17),
    ]
    allocations = [
        allocation(0, 1024, (1, 0, 1024), _5=1),
        allocation(1, 1024, (6, 0, 1024), _7=1),
        allocation(2, 3500, (2, 0, 2048), (3, 0, 2048), (4, 2048, 1024), (5, 2176, 1024)),
        allocation(3, 64, _12=1),  # a constant
        allocation(4, 64, _3=1),  # thread-local
    ]
    trace = encode(
        _1=[
            event(0, 4, "early"),
            event(1, 4, "early"),
            event(0, 2, "zeros"),
            event(2, 3, "loop", share=2),
            event(1, 2, "loop"),
            event(0, 5, "late"),
            event(1, 3, "out"),
            event(1, 5, "out"),
        ]
    )
    buffers += [b for some, _, _ in more for b in some]
    allocations += [a for _, a, _ in more]
    traces = [trace, *(t for _, _, t in more)]
    return encode(_1=module, _3=encode(_1=buffers, _3=allocations, _4=traces))


def test_numbers_and_nested_messages_are_read():
    message = Message(encode(_1=[1, 300, 2**63 - 1], _2="né", _4=(1, 128, 3), _5=encode(_1=7)))
    assert message.numbers(1) == [1, 300, 2**63 - 1]
    assert (message.text(2), message.numbers(4), message.message(5).number(1)) == (
        "né",
        [1, 128, 3],
        7,
    )
    assert (message.number(9), message.text(9), message.numbers(9)) == (0, "", [])


def test_fixed_width_fields_are_stepped_over():
    assert Message(b"\x09" + bytes(8) + b"\x15" + bytes(4) + encode(_3=5)).number(3) == 5


def test_every_allocation_is_held_and_temporaries_at_their_peak():
    found = peak(program())
    assert [(h.kind, h.bytes, h.op) for h in found.held] == [
        ("argument", 1024, "params['w']"),
        ("output", 1024, "jit(f)/neg"),
        ("temporary", 2048, "jit(f)/while"),
        ("temporary", 1024, "jit(f)/late"),
        ("packing", 3500 - 2048 - 1024, ""),
    ]
    assert found.op == "jit(f)/late"
    stack = found.held[2]
    assert stack.sources == ("jit(f)/while/body/tanh",)
    assert (stack.dtype, stack.shape, stack.handed_on) == ("f32", (2, 256), ("loop",))
    assert found.held[1].index == 1


def in_use(found: Peak) -> list[int]:
    lives, points = found.lives, range(len(found.points))
    return [sum(x.held.bytes for x in lives if x.first <= at <= x.last) for at in points]


def test_a_history_follows_the_simulation_of_the_heap():
    found = peak(program())
    assert found.moments == 4
    assert [op.rpartition("/")[2] for op, _ in found.points] == [
        "early",
        "zeros",
        "while",
        "late",
    ]
    assert in_use(found) == [1024, 2048, 2048, 3072]
    # One life from the zeros to what the loop made of them, named as at the peak.
    stack = next(x for x in found.lives if x.held.shape == (2, 256))
    assert (stack.first, stack.last) == (1, 3)
    assert stack.held in found.held
    assert sum(h.bytes for h in found.held if h.kind == "temporary") == max(in_use(found))


def test_histories_of_several_allocations_are_put_together_by_the_schedule():
    other = encode(_1=[event(0, 7, "one"), event(1, 7, "one")])  # within the loop's body
    found = peak(program(([buffer(7, 22, size=512)], allocation(5, 512, (7, 0, 512)), other)))
    ops = [op.rpartition("/")[2] for op, _ in found.points]
    assert ops == ["early", "zeros", "tanh", "while", "late"]
    assert in_use(found) == [1024, 2048, 2560, 2048, 3072]


def test_what_has_no_history_is_there_all_the_time():
    found = peak(program(([buffer(7, 22, size=512)], allocation(5, 512, (7, 0, 512)), b"")))
    assert in_use(found) == [1536, 2560, 2560, 3584]


def test_a_long_history_keeps_the_fullest_moment_of_each_range():
    """One after the other, each buffer is alone in its allocation."""
    sizes = [1 + 7919 * i % 9973 for i in range(10 * POINTS + 7)]
    names = ("early", "one")  # the same instruction twice in a row would be one moment
    slices = [(100 + i, 0, size) for i, size in enumerate(sizes)]
    events = [event(k, 100 + i, names[i % 2]) for i in range(len(sizes)) for k in (0, 1)]
    buffers = [buffer(100 + i, 15) for i in range(len(sizes))]
    found = peak(program((buffers, allocation(5, 9973, *slices), encode(_1=events))))
    assert found.moments >= len(sizes)
    assert len(found.points) == POINTS
    assert max(sizes) <= max(in_use(found)) <= max(sizes) + 3072
    assert min(in_use(found)) > 9973 / 2, "of ten moments the fullest"


def test_it_survives_json():
    found = peak(program())
    assert Peak.of(json.loads(json.dumps(dataclasses.asdict(found)))) == found


@pytest.mark.parametrize("keep", [0, 1, 40, 300, 700, -1, -60])
def test_what_is_cut_off_is_an_error(keep):
    with pytest.raises(StepError, match="buffer assignment .* cannot be read"):
        peak(program()[:keep])


def test_garbage_is_an_error_or_a_program():
    """Bytes that are changed at random never raise anything but StepError."""
    rng, whole = random.Random(0), program()
    failed = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(3):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            peak(bytes(data))
        except StepError:
            failed += 1
    assert failed > 100
    with pytest.raises(StepError, match="cannot be read"):
        peak(bytes(rng.randrange(256) for _ in range(4000)))

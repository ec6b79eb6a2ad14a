"""Reads serialized protobufs without a schema.

No schema of XLA's is installed with JAX, so the few fields that are needed are read from the wire
format by their numbers. In this format nested messages, texts and packed numbers are all
bytes; the code that reads a field knows its type.
"""

from collections.abc import Iterator


class Message:
    """One protobuf message, read from its bytes. Raises ValueError if the bytes are none.

    fields: the values of each field by its number, as int or bytes, in the order of the bytes.
    """

    def __init__(self, data: bytes):
        self.fields: dict[int, list] = {}
        at = 0
        while at < len(data):
            key, at = _varint(data, at)
            field, wire = key >> 3, key & 7
            # Wire types: 0 is an integer, 2 begins with its length, 1 and 5 have 8 and 4 bytes.
            # XLA's messages are in proto3, which has no other wire types.
            if wire == 0:
                value, at = _varint(data, at)
            elif wire in (1, 2, 5):
                size, at = _varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
                value = data[at : at + size]
                at += size
            else:
                raise ValueError(f"wire type {wire} at byte {at}")
            if field == 0 or at > len(data):
                raise ValueError(f"field {field} ends at byte {at} of {len(data)}")
            self.fields.setdefault(field, []).append(value)

    def number(self, field: int) -> int:
        """The field as an integer, 0 where none is written. As in all protobufs the last value
        counts.
        """
        value = self.fields.get(field, [0])[-1]
        return value if isinstance(value, int) else 0

    def text(self, field: int) -> str:
        """The field as text, "" where it is not written."""
        value = self.fields.get(field, [b""])[-1]
        return value.decode(errors="replace") if isinstance(value, bytes) else ""

    def numbers(self, field: int) -> list[int]:
        """The values of a repeated integer, packed into one value or not."""
        found: list[int] = []
        for value in self.fields.get(field, []):
            if isinstance(value, int):
                found.append(value)
                continue
            at = 0
            while at < len(value):
                one, at = _varint(value, at)
                found.append(one)
        return found

    def messages(self, field: int) -> "Iterator[Message]":
        """The values of a repeated message. Raises ValueError if the bytes are none."""
        for value in self.fields.get(field, []):
            if not isinstance(value, bytes):
                raise ValueError(f"field {field} is a number, and not a message")
            yield Message(value)

    def message(self, field: int) -> "Message":
        """The field's first message, an empty one where it is not written."""
        return next(self.messages(field), Message(b""))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the integer that begins at byte `at`, and where the next field begins.

    Each byte holds seven bits, the lowest first; its highest bit says whether another one follows.
    """
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError(f"a number at byte {at} of {len(data)} does not end")
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at

"""Messages between the compiling processes: a length, a JSON header, and the bytes that the header
announces.
"""

import json
import struct
from typing import IO

_LENGTH = struct.Struct(">Q")  # of the header: 8 bytes, the highest first


def write_message(stream: IO[bytes], header: dict, payload: bytes = b"") -> None:
    """Writes one message. `header` is JSON's kind of data, without a key "payload"."""
    head = json.dumps(header | {"payload": len(payload)}).encode()
    stream.write(_LENGTH.pack(len(head)) + head)
    stream.write(payload)
    stream.flush()


def read_message(stream: IO[bytes]) -> tuple[dict, bytes] | None:
    """Returns the next message, or None where the stream has ended, be it within a message."""
    if (length := _exactly(stream, _LENGTH.size)) is None:
        return None
    if (head := _exactly(stream, _LENGTH.unpack(length)[0])) is None:
        return None
    header = json.loads(head)
    payload = _exactly(stream, header["payload"])
    return None if payload is None else (header, payload)


def _exactly(stream: IO[bytes], size: int) -> bytes | None:
    """Returns the next `size` bytes, or None if the stream ends before."""
    found = stream.read(size)
    return found if len(found) == size else None

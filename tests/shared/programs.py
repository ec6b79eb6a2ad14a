"""Compares compiled programs."""

import hashlib
import re


def program(compiled) -> str:
    """Returns a hash of a program's instructions. The hash ignores the names and the order of
    instructions, and the tables of source locations: all depend on the program's source.
    """
    text = re.sub(r", metadata=\{[^}]*\}|HloModule [^,]*|%[\w.-]+", "", compiled.as_text())
    lines = (line for line in text.splitlines() if line and not re.match(r"\d+ ", line))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def nbytes(compiled) -> int:
    """Returns the bytes that XLA counts: temporaries, arguments, and outputs that alias none."""
    found = compiled.memory_analysis()
    held = found.temp_size_in_bytes + found.argument_size_in_bytes + found.output_size_in_bytes
    return held - found.alias_size_in_bytes

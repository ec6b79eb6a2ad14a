"""Compiled programs, to compare."""

import hashlib
import re


def program(compiled) -> str:
    """A hash of a program's instructions: without their names and order in the text, which follow
    where in the source they are from, and without the tables of that, whose lines are numbered.
    """
    text = re.sub(r", metadata=\{[^}]*\}|HloModule [^,]*|%[\w.-]+", "", compiled.as_text())
    lines = (line for line in text.splitlines() if line and not re.match(r"\d+ ", line))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()

"""Finds results of a compiled module that share a buffer with an argument in another memory.

JAX pairs donated arguments with results of the same shape and dtype, in order. Where the memory of
one of them is unknown to JAX, it pairs all of them without comparing memories (jax 0.10.2 to
0.11.2): a result in device memory may then take the buffer of an argument in host memory.
"""

import re

from jaxmem._target.hlo.text import HOST

# {3}: (1, {}, may-alias) where the module returns a tuple, {}: (1, {}, ...) where it does not
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_ALIASES = re.compile(r"input_output_alias=\{ (.*?) \}[,\n]")
_LAYOUT = re.compile(r"entry_computation_layout=\{\((.*?)\)->\(?(.*)")
_ARRAY = re.compile(r"(\w+\[[\d,<=]*\])(?:\{([^}]*)\})?")


def misplaced(text: str) -> tuple[str, ...]:
    """Returns the types, such as "f32[6,256]", of results that share a buffer with an argument in
    another memory, host or device.

    text: that of an optimized module, `compiled.as_text()`.
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

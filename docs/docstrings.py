"""An extension of mkdocstrings: the lists of arguments in docstrings, a line each, become lists of
the page, with or without a heading such as `Args:` above them.

    budget: bytes of the whole step,             - `budget`: bytes of the whole step,
      or None for all of them           ->         or None for all of them
    target: the device                           - `target`: the device
"""

import re
import textwrap

import griffe

HEADING = re.compile(r"(Args|Arguments|Attributes):$")
ITEM = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)")


class Lists(griffe.Extension):
    def on_object(self, *, obj, **_) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    return "\n\n".join(map(_paragraph, text.split("\n\n")))


def _paragraph(text: str) -> str:
    """The paragraph, as a list if each of its lines is an item or goes on with one."""
    first, _, rest = text.partition("\n")
    if HEADING.match(first):
        text = textwrap.dedent(rest)
    lines = text.split("\n")
    items = [ITEM.match(line) for line in lines]
    if items[0] is None or not all(item or line[:1] == " " for item, line in zip(items, lines)):
        return text
    return "\n".join(_item(m[1], m[2]) if m else line for m, line in zip(items, lines))


def _item(names: str, text: str) -> str:
    return f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {text}"

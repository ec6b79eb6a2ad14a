"""How each action is shown: on pages, in notebooks and in a terminal."""

import dataclasses

from jaxmem._core.actions import Action


@dataclasses.dataclass(frozen=True)
class Look:
    """The look of one action.

    letter: stands for the action where there is no room for its name.
    meaning: what the action does with a tensor, in words.
    light, dark: its colour on a light page and on a dark one.
    terminal: its colour in a terminal, by rich's name.
    marks: the pattern over its colour, as SVG in a square of 7; empty for none.
    """

    letter: str
    meaning: str
    light: str
    dark: str
    terminal: str
    marks: str = ""


LOOKS = {
    Action.KEEP: Look("K", "stays in device memory", "#0072b2", "#4aa3df", "green"),
    Action.RECOMPUTE: Look(
        "R", "made again in the backward", "#eec25c", "#8f6c1d", "yellow", '<path d="M0 7L7 0"/>'
    ),
    Action.COMPRESS: Look(
        "C",
        "held as codes on the device",
        "#0f9d78",
        "#2fb991",
        "magenta",
        '<circle cx="3.5" cy="3.5" r="1.1"/>',
    ),
    Action.OFFLOAD: Look(
        "O", "waits in host memory", "#c06a9e", "#d184b4", "blue", '<path d="M0 3.5H7"/>'
    ),
    Action.COMPRESS_OFFLOAD: Look(
        "CO",
        "waits in host memory as codes",
        "#d55e00",
        "#ea7a33",
        "cyan",
        '<path d="M0 3.5H7M3.5 0V7"/>',
    ),
}

# Elements of an action's patterns, for a page's head.
PATTERNS = (
    '<svg width="0" height="0" class="defs" aria-hidden="true"><defs>'
    + "".join(
        f'<pattern id="t-{action}" width="7" height="7" patternUnits="userSpaceOnUse"><g'
        f' class="texture">{look.marks}</g></pattern>'
        for action, look in LOOKS.items()
        if look.marks
    )
    + "</defs></svg>"
)


def _colours(light: bool) -> str:
    """The style sheet's variables of the actions' colours, on a light or a dark page."""
    of = lambda look: look.light if light else look.dark
    return " ".join(f"--{action}: {of(look)};" for action, look in LOOKS.items())


# The rules of a page's style sheet for the classes `a-ACTION` (colour) and `t-ACTION` (pattern).
STYLE = "\n".join(
    [
        f":root {{ {_colours(light=True)} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_colours(light=False)} }} }}",
        *(f".a-{action} {{ --a: var(--{action}); }}" for action in LOOKS),
        *(
            f".t-{action} {{ fill: {f'url(#t-{action})' if look.marks else 'none'}; }}"
            for action, look in LOOKS.items()
        ),
    ]
)

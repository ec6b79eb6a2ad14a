"""Small random profiles, and an oracle that prices an assignment by recursion over values, without
library code.
"""

import dataclasses
import itertools
import math

from hypothesis import strategies as st

from jaxmem._core.actions import KEEP, OFFLOAD, RECOMPUTE, Action, Choice
from jaxmem._core.profile import BlockClass, Equation, Option, Profile, Tag

INT4, INT8 = Choice(Action.COMPRESS, "int4"), Choice(Action.COMPRESS, "int8")
INT4_OFFLOAD = Choice(Action.COMPRESS_OFFLOAD, "int4")
PRICE = 1.001  # the factor on seconds of recomputation, as in the library
MOST_ASSIGNMENTS = 1000


def block(equations, needed, sizes, tags=(), inputs=(0,), free=(), **other) -> BlockClass:
    """`equations`: (inputs, outputs, seconds, tag name or None); `tags`: name -> options, or a list
    of (name, options), one for each tag among the equations.
    """
    made = tuple(
        Equation("op" if t is None else "tag", tuple(i), tuple(o), s, tag=t)
        for i, o, s, t in equations
    )
    places = [e for e in made if e.tag]
    if isinstance(tags, dict):  # in an order of its own
        value = {e.tag: e.outputs[0] for e in places}
        placed = [(n, value[n], options) for n, options in tags.items()]
    else:
        placed = [(n, e.outputs[0], options) for (n, options), e in zip(tags, places, strict=True)]
    named = tuple(Tag(n, None, (1,), "uint8", v, tuple(options)) for n, v, options in placed)
    fields = {"name": "block", "fingerprint": "", "layers": 1, "runs": 1} | other
    return BlockClass(
        values=tuple(sizes), inputs=tuple(inputs), free=tuple(free), needed=tuple(needed),
        equations=made, tags=named, **fields,
    )  # fmt: skip


def profile(*blocks, link=1.0) -> Profile:
    return Profile("", blocks, "test", link, 1.0, "measured")


def flat(actions):
    return {(b, t): c for b, tags in actions.items() for t, c in tags.items()}


def nested(assignment, made):
    result = {b.name: {} for b in made.blocks}
    for (label, tag), choice in assignment.items():
        result[label][tag] = choice
    return result


def copied(choice: Choice, size: int, copies: float, coding: float = 0.0) -> Option:
    """Returns an option that copies `size` bytes to host memory and back in `copies` seconds."""
    return Option(choice, 0, size, copies + coding, host_seconds=copies)


def chain(**other):
    """x -> a (1 s) -> tag "u" -> b (2 s, twice the bytes) -> tag "v"; the backward reads "v" and
    "u".
    """
    tags = {"u": [Option(KEEP, 10, 0, 0.1), Option(INT4, 3, 0, 0.4), copied(OFFLOAD, 10, 0.2)]}
    tags["v"] = [Option(KEEP, 20, 0, 0.2), Option(INT4, 6, 0, 0.8)]
    steps = (1.0, None), (0.0, "u"), (2.0, None), (0.0, "v")
    equations = [([i], [i + 1], *step) for i, step in enumerate(steps)]
    return block(equations, [2, 4], [5, 10, 10, 20, 20], tags, **other)


def deep(tags=10, depth=14):
    """Returns a block of `tags` tags with eight options each, and `tags * depth` equations with
    skip connections.
    """
    equations, sizes, named = [], [4 * 2**20], {}
    for t in range(tags):
        for d in range(depth):
            new = len(sizes)
            operands = {max(0, new - 1), max(0, new - 2 - (3 * t + 5 * d) % 7)}
            equations.append((operands, (new,), 1e-5 * (1 + (7 * t + 3 * d) % 11), None))
            sizes.append((1 + (5 * t + d) % 13) * 2**20)
        size = sizes[-1]
        codecs = [(f"c{k}", size // (k + 1), 1e-5 * (k + t % 3)) for k in (1, 2, 3)]
        named[f"t{t}"] = [Option(KEEP, size, 0, size / 2e12), copied(OFFLOAD, size, size / 1e12)]
        named[f"t{t}"] += [Option(Choice("compress", c), n, 0, s) for c, n, s in codecs]
        sent = lambda codec: Choice("compress_offload", codec)
        named[f"t{t}"] += [copied(sent(c), n, s / 2, s) for c, n, s in codecs]
        equations.append(((len(sizes) - 1,), (len(sizes),), 0.0, f"t{t}"))
        sizes.append(size)
    times = {"forward_seconds": 2e-3, "backward_seconds": 4e-3}
    return block(equations, range(0, len(sizes), 9), sizes, named, layers=24, runs=24, **times)


@dataclasses.dataclass(frozen=True)
class Price:
    saved: int
    host: int
    seconds: float
    recompute: float
    transient: int
    effective: dict
    doubt: float = 0.0

    @property
    def bytes(self) -> int:
        return self.saved + self.transient

    @property
    def priced(self) -> float:
        return self.seconds + self.doubt + (PRICE - 1) * self.recompute


def oracle(profile: Profile, assignment: dict, working=()) -> Price:
    """`assignment`: (block, tag) -> choice."""
    saved = host = 0
    seconds = recompute = doubt = 0.0
    effective = dict.fromkeys(assignment, RECOMPUTE)
    for b in profile.blocks:
        made_by = {o: e for e in b.equations for o in e.outputs}
        options = {(t.value, o.choice): o for t in b.tags for o in t.options}
        visited, repeated = set(), set()
        device = moved = 0
        kept = doubted = 0.0

        def visit(v, b=b, made_by=made_by, options=options, visited=visited, repeated=repeated):
            nonlocal device, moved, kept, doubted
            if v in b.free or v in visited:
                return
            visited.add(v)
            if v in b.inputs:
                device += b.values[v]
                kept += b.input_seconds[b.inputs.index(v)] if b.input_seconds else 0.0
                return
            e = made_by[v]
            choice = assignment[b.name, e.tag] if e.tag else RECOMPUTE
            if choice != RECOMPUTE:
                option = options[e.outputs[0], choice]
                device += option.device_bytes
                moved += option.host_bytes
                kept += option.seconds
                doubted += option.doubt
                effective[b.name, e.tag] = choice
                return
            if e.tag is None:
                repeated.add(e)
            for u in e.inputs:
                visit(u)

        for v in b.needed:
            visit(v)
        again = sum(e.seconds for e in repeated)
        wait = moved / profile.link_bytes_per_second
        exposed = max(0.0, wait - profile.overlap * b.forward_seconds)
        work = b.backward_seconds + again
        exposed += max(0.0, b.backwards * wait - profile.overlap * work)
        saved, host = saved + b.layers * device, host + b.layers * moved
        seconds, recompute = seconds + b.runs * (again + kept + exposed), recompute + b.runs * again
        doubt += b.runs * doubted
    extra = sum(dict(working).get((*k, c), 0) for k, c in effective.items())
    return Price(saved, host, seconds, recompute, extra, effective, doubt)


def open_to(profile: Profile) -> dict:
    """Returns the choices by (block, tag) that all occurrences of the name have in all classes of
    the label.
    """
    result: dict = {}
    for b in profile.blocks:
        for t in b.tags:
            choices = [RECOMPUTE, *(o.choice for o in t.options)]
            known = result.get((b.name, t.name), choices)
            result[b.name, t.name] = [c for c in known if c in choices]
    return result


def assignments(profile: Profile):
    choices = open_to(profile)
    for picked in itertools.product(*choices.values()):
        yield dict(zip(choices, picked))


def prices(profile: Profile, working=()) -> list[Price]:
    """Returns the price of every assignment. Equal assignments may occur more than once."""
    return [oracle(profile, a, working) for a in assignments(profile)]


@st.composite
def options(draw, size: int) -> tuple[Option, ...]:
    seconds = st.integers(0, 30).map(lambda n: n / 10)
    made = [Option(KEEP, size, 0, draw(seconds))]
    if draw(st.booleans()):
        made.append(Option(INT4, size // 4 + 1, 0, draw(seconds)))
    if draw(st.booleans()):
        made.append(copied(OFFLOAD, size, draw(seconds)))
    if draw(st.integers(0, 3)) == 0:
        made.append(copied(INT4_OFFLOAD, size // 4 + 1, draw(seconds), draw(seconds)))
    return tuple(made)


@st.composite
def blocks(draw, name: str, most_tags: int) -> BlockClass:
    sizes = [draw(st.integers(0, 100)) for _ in range(3)]  # two inputs, and one value that is free
    equations, tags, names = [], [], []
    for _ in range(draw(st.integers(1, 14))):
        earlier = st.integers(0, len(sizes) - 1)
        operands = draw(st.lists(earlier, min_size=1, max_size=3, unique=True))
        outputs = range(len(sizes), len(sizes) + draw(st.sampled_from((1, 1, 1, 2))))
        sizes += [draw(st.integers(0, 100)) for _ in outputs]
        equations.append((operands, outputs, draw(st.integers(0, 50)) / 10, None))
        for value in outputs[-1:] if len(tags) < most_tags and draw(st.integers(0, 2)) else ():
            # Some tags repeat an earlier name; some directly follow the earlier tag.
            new = not names or draw(st.integers(0, 3))
            tag = f"t{len(names)}" if new else draw(st.sampled_from(names))
            names += [tag] if new else []
            for _ in range(1 if len(tags) + 1 == most_tags or draw(st.integers(0, 5)) else 2):
                equations.append(((value,), (len(sizes),), 0.0, tag))
                tags.append((tag, draw(options(sizes[value]))))
                value = len(sizes)
                sizes.append(sizes[equations[-1][0][0]])
    needed = draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1, max_size=4))
    layers = draw(st.integers(1, 3))
    return block(
        equations, sorted(needed | {len(sizes) - 1}), sizes, tags, inputs=(0, 1), free=(2,),
        name=name, layers=layers, runs=layers * draw(st.integers(1, 2)),
        forward_seconds=draw(st.integers(0, 10)) / 1.0,
        backward_seconds=draw(st.integers(0, 20)) / 1.0,
        input_seconds=(draw(st.integers(0, 9)) / 10, 0.0),
        backwards=draw(st.sampled_from((1, 1, 2))),
    )  # fmt: skip


def _with_options(made: Profile, options) -> Profile:
    """Returns the profile with the options `options(tag.options)` of every tag."""
    replaced = lambda tag: dataclasses.replace(tag, options=tuple(options(tag.options)))
    tags = lambda block: tuple(map(replaced, block.tags))
    blocks = tuple(dataclasses.replace(block, tags=tags(block)) for block in made.blocks)
    return dataclasses.replace(made, blocks=blocks)


def doubted(made: Profile, uncertainty: float, seen: float) -> Profile:
    """Returns the profile with a doubt for every choice that compresses."""
    doubt = lambda o: uncertainty * o.seconds + seen if o.choice.codec else o.doubt
    options = lambda of: [dataclasses.replace(o, doubt=doubt(o)) for o in of]
    return dataclasses.replace(_with_options(made, options), uncertainty=uncertainty)


@st.composite
def profiles(draw) -> Profile:
    """Draws one block of up to 8 tags, or two classes of up to 5 tags with one label or two labels:
    few enough to try all assignments.
    """
    names = draw(st.sampled_from((("block",), ("block", "block"), ("block", "other"))))
    classes = [draw(blocks(n, 8 if len(names) == 1 else 5)) for n in names]
    made = profile(*classes, link=draw(st.sampled_from((5.0, 30.0))))
    return _thinned(dataclasses.replace(made, overlap=draw(st.sampled_from((0.25, 1.0)))))


def _thinned(made: Profile) -> Profile:
    """Drops options, the last ones first, until all assignments can be tried."""
    while math.prod(map(len, open_to(made).values())) > MOST_ASSIGNMENTS:
        most = max(len(t.options) for b in made.blocks for t in b.tags)
        made = _with_options(made, lambda options, most=most: options[: most - 1])
    return made


def working_of(profile: Profile):
    """A strategy for corrections of either sign to some of the choices."""
    keys = [(*k, c) for k, choices in open_to(profile).items() for c in choices]
    if not keys:
        return st.just({})
    return st.dictionaries(st.sampled_from(keys), st.integers(-60, 60), max_size=6)

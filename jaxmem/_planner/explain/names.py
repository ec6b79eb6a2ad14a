"""Names the buffers of a compiled step: arguments by their path, saved tensors by the tag that they
must be.

The compiled program does not know tags. So what each block should save under a plan is computed
from its graph (`expected`), and compared with the buffers by size, dtype and operation
(`name_saved`).
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

import jax

from jaxmem._core.actions import KEEP, RECOMPUTE, REST, Actions
from jaxmem._core.profile import BlockClass
from jaxmem._model.codecs.registry import parse
from jaxmem._model.states.places import HOST
from jaxmem._result.memory.explanation import Item, Part
from jaxmem._target.buffers.held import Held, Peak
from jaxmem._trace.primitives import RELABELLED

_PARTS = 8  # an argument with more children than this is one part


@dataclasses.dataclass(frozen=True)
class Saved:
    """An array that a layer saves for the backward.

    name: how the user knows it.
    tagged: whether a tag names it; else it is the layer's input.
    dtype: as XLA writes it, "" where it is unknown.
    bytes: those of one layer on one device.
    layers: how many layers' arrays are alive at once.
    primitive: the name of the JAX operation that makes it, None where it is unknown.
    host: whether it is held in host memory.
    asked: whether a plan asks for it. Where everything is kept, a tag is saved only if the backward
      reads that very tensor.
    """

    name: str
    tagged: bool
    dtype: str
    bytes: int
    layers: int
    primitive: str | None
    host: bool
    asked: bool


def expected(blocks: Sequence[BlockClass], actions: Actions | None) -> list[Saved]:
    """Returns what the blocks save under a plan's `actions`, or where they are None without a plan.

    blocks: the step's blocks, divided into groups of layers as the plan's labels say.
    """
    found = []
    for block in blocks:
        chosen = {REST: KEEP} if actions is None else actions.get(block.name, {})
        made = {v: e for e in block.equations for v in e.outputs}  # by value, what makes it
        label = "" if len({b.name for b in blocks}) == 1 else f" of {block.name}"
        covered = set()  # values that are a saved tag's own tensor, under another name
        for tag in block.tags:
            choice = KEEP if chosen.get(REST) == KEEP else chosen.get(tag.name, RECOMPUTE)
            if choice == RECOMPUTE:
                continue
            # XLA names a buffer after the operation that computes it, and not after the tag or the
            # reshapes and casts that follow it: go back to that operation.
            primitive, equation = None, made.get(tag.value)
            while equation is not None and (equation.tag or equation.primitive in RELABELLED):
                covered.add(equation.inputs[0])
                equation = made.get(equation.inputs[0])
            if equation is not None:
                primitive = equation.primitive
            arrays, name = [jax.ShapeDtypeStruct(tag.shape, tag.dtype)], f"{tag.name}{label}"
            if choice.codec is not None:
                # Codes, scales and whatever else a codec holds; a tag's encoder has this name.
                arrays = jax.tree.leaves(jax.eval_shape(parse(choice.codec).encode, arrays[0]))
                primitive, name = f"jit({tag.name}_encode)", f"codes of {name}"
            host, asked = choice.action.offloads, chosen.get(REST) != KEEP
            for a in arrays:
                size = -(-tag.turns * a.size * a.dtype.itemsize // tag.shards)
                found.append(
                    Saved(
                        name, True, _xla_dtype(a.dtype), size, block.layers, primitive, host, asked
                    )
                )
        # What a block recomputes from, it saves: its inputs, but not those that a tag saves anyhow.
        for v in set(block.inputs) - covered if chosen.get(REST) != KEEP else ():
            found.append(
                Saved(
                    f"input of the layer{label}",
                    False,
                    "",
                    block.values[v],
                    block.layers,
                    None,
                    False,
                    True,
                )
            )
    return found


def name_saved(full: Peak, saved: list[Saved], layers: set[int]) -> dict[Held, tuple[str, str]]:
    """Returns the kind and the part of each buffer that is saved for the backward, by its bytes,
    its dtype and the operation that makes it.

    Buffers that these do not tell apart are named together, after every tag that they may be.

    full: what the compiled program holds.
    saved: what its blocks should save.
    layers: the numbers of layers that its blocks have, those without a tag too.
    """
    backward = "transpose(" in full.op
    made = [h for h in full.held if h.kind == "temporary" and (h.host or _forward(h))]
    # Each buffer, and how many layers' tensors are in it.
    stacks = [(h, h.shape[0]) for h in made if _is_stack(h, layers)]
    # Where layers are unrolled in Python there are no stacks: what the forward made and is alive in
    # the backward was saved.
    alone = [(h, 1) for h in made if backward and not h.loops and not h.handed_on]
    buckets: dict[tuple, list[Held]] = collections.defaultdict(list)
    for h, count in stacks or alone:
        buckets[h.bytes // count, h.dtype, h.host].append(h)
    names: dict[Held, tuple[str, str]] = {}
    for (size, dtype, host), held in buckets.items():
        # First the buffers that a known operation makes, then what is left of both.
        fits = [s for s in saved if s.bytes == size and s.dtype in ("", dtype) and s.host == host]
        for primitive in dict.fromkeys(s.primitive for s in fits if s.primitive):
            same = [h for h in held if h not in names and _made_by(h, primitive)]
            fitting = [s for s in fits if s.primitive == primitive]
            if same:
                names |= _together(same, fitting)
                fits = [s for s in fits if s not in fitting]
        if left := [h for h in held if h not in names]:
            names |= _together(left, [s for s in fits if s.asked])
    return names


def _together(held: list[Held], saved: list[Saved]) -> dict[Held, tuple[str, str]]:
    """One kind and one part for all of `held`, each of which may be any of `saved`."""
    *first, last = dict.fromkeys(s.name for s in saved if s.tagged) or [""]
    label = f"{', '.join(first)} or {last}" if first else last
    if not label:
        inputs = list(dict.fromkeys(s.name for s in saved))
        return dict.fromkeys(
            held, ("untagged", f"saved: {inputs[0]}" if inputs else "saved without a tag")
        )
    # Bytes beyond those of the tags are of other tensors of the same size.
    more = sum(h.bytes for h in held) > sum(s.layers * s.bytes for s in saved)
    return dict.fromkeys(
        held, ("saved", f"saved: {label}{', and others without a tag' if more else ''}")
    )


def _is_stack(h: Held, layers: set[int]) -> bool:
    """Whether a loop over layers stacks the buffer, one layer after the other.

    layers: the numbers of layers that loops may have.
    """
    handed_on = h.handed_on or h.op.endswith("/dynamic_update_slice")
    return len(h.shape) > 1 and h.shape[0] > 1 and h.shape[0] in layers and bool(handed_on)


def _forward(h: Held) -> bool:
    """Whether a differentiated forward computes what lies in the buffer."""
    return any("jvp(" in op and "transpose(" not in op for op in h.sources or (h.op,))


def _made_by(h: Held, primitive: str) -> bool:
    """Whether JAX's operation `primitive` makes it: the last word of the operation's name, or
    anywhere in it that of a call, such as "jit(up_encode)".
    """
    return any(
        primitive in op.split("/") if "(" in primitive else op.endswith(f"/{primitive}")
        for op in h.sources
    )


def operation(h: Held) -> str:
    """Returns the last word of the JAX operation that makes a buffer, "" where XLA names none."""
    ops = [op.rpartition("/")[2] for op in (*h.sources, h.op) if op]
    return ops[0] if ops else ""


def show_array(h: Held) -> str:
    """Returns a buffer's dtype and shape as XLA writes them, such as "f32[4,32]"."""
    return f"{h.dtype}[{','.join(map(str, h.shape))}]"


def _xla_dtype(dtype) -> str:
    """A dtype as XLA writes it: bfloat16 is bf16, float8_e4m3fn f8e4m3fn, int4 s4."""
    # In this order: "uint" holds "int".
    words = (
        ("bool", "pred"),
        ("float", "f"),
        ("uint", "u"),
        ("int", "s"),
        ("complex", "c"),
        ("_", ""),
    )
    return functools.reduce(lambda name, word: name.replace(*word), words, str(dtype))


class Arguments:
    """The names of a step's arguments and results, which are the paths that a user knows, and the
    parts that arguments make.

    traced: the step, as `jaxmem._trace.step.trace` returns JAX's stage of it.
    args: what it was traced for.

    The attribute `donated` holds (dtype, shape) of the donated arguments of two dimensions or more,
    `hosted` the paths of the arguments that lie in host memory.
    """

    def __init__(self, traced: jax.stages.Traced, args: tuple):
        leaves = jax.tree_util.tree_leaves_with_path(args)
        info = getattr(getattr(traced.jaxpr, "jaxpr", traced.jaxpr), "debug_info", None)
        avals = traced.jaxpr.in_avals
        names = getattr(info, "arg_names", None) or [
            f"args{jax.tree_util.keystr(path)}" for path, _ in leaves
        ]
        # A step that flattens its arguments in a way of its own has other paths: they are counted.
        self._names = (
            list(names) if len(names) == len(avals) else [f"args[{i}]" for i in range(len(avals))]
        )
        self._outputs = list(getattr(info, "result_paths", None) or ())
        kinds = [getattr(getattr(a, "sharding", None), "memory_kind", None) for _, a in leaves]
        self.hosted = {name for name, kind in zip(self._names, kinds) if kind == HOST}
        flags = [i.donated for i in jax.tree.leaves(traced.args_info)]
        self.donated = {
            (_xla_dtype(a.dtype), a.shape) for a, given in zip(avals, flags) if given and a.ndim > 1
        }
        self._kept = {name for name, given in zip(self._names, flags) if not given}
        # An argument such as a train state is taken apart into its children, where they are few and
        # at least one of them holds several arrays.
        children: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        for name in self._names:
            root, child = self._head(name)
            children[root][child] += 1
        self._split = {
            r for r, c in children.items() if len(c) <= _PARTS and sum(c.values()) > len(c)
        }

    def name_of(self, op: str) -> str:
        """Returns an argument's path.

        op: its name in the program, which is the path, or "args[3]" for a place among the flat
          arguments of an exported step.
        """
        place = re.fullmatch(r"args\[(\d+)\]", op)
        if place and op not in self._names and int(place[1]) < len(self._names):
            return self._names[int(place[1])]
        return op or "unnamed"

    def part_of(self, name: str) -> str:
        """Returns the part that an argument belongs to: its role by the words of its path, and the
        path of the root or of its child.
        """
        root, child = self._head(name)
        held = child if root in self._split else root
        # "opt_state" is matched whole, by its nine letters: the expression would take it apart.
        words = set(
            re.findall(r"[a-z]+", held.lower().removeprefix("opt_state")) + [held.lower()[:9]]
        )
        if name in self._kept:  # a step's state is donated, its batch is not
            role = "batch"
        elif words & {"params", "param", "parameters", "weights"}:
            role = "parameters"
        elif words & {"moments", "opt", "optimizer", "opt_state", "mu", "nu", "momentum"}:
            role = "optimizer state"
        else:
            role = "arguments"
        return f"{role}: {held}"

    def output(self, index: int) -> str:
        """Returns the path of the output at `index`, "" where it is unknown."""
        return self._outputs[index] if 0 <= index < len(self._outputs) else ""

    @staticmethod
    def _head(name: str) -> tuple[str, str]:
        """The first part of a path, and its first two: of state.params['w'] these are state and
        state.params.
        """
        parts = re.findall(r"^[^.\[]+|\.[^.\[]+|\[[^\]]*\]", name)
        return (parts[0] if parts else name), "".join(parts[:2])


Row = tuple[str, str, str, int]  # a kind, a part of it, an item of the part, and bytes

# Kinds, from the one that is named least surely.
UNSURE = (
    *("packing", "other", "outside", "layer", "gradients"),
    *("untagged", "saved", "outputs", "arguments"),
)


def without(rows: list[Row], excess: int) -> list[Row]:
    """Rows of (kind, part, item, bytes) less `excess` bytes in all, which several buffers are said
    to hold and XLA counts once. They are taken from what is named least surely.
    """
    kept = []
    for row in sorted(rows, key=lambda row: UNSURE.index(row[0])):
        taken = min(excess, row[3])
        excess -= taken
        kept += [(*row[:3], row[3] - taken)] if row[3] > taken else []
    return kept


def added_up(rows: Iterable[Row]) -> tuple[Part, ...]:
    """Rows, added up; the largest part and the largest items first."""
    grouped: dict[tuple[str, str], dict[str, list[int]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for kind, part, item, size in rows:
        grouped[kind, part][item].append(size)
    parts = []
    for (kind, name), found in grouped.items():
        items = sorted(
            (Item(item, sum(s), len(s)) for item, s in found.items()), key=lambda i: -i.bytes
        )
        parts.append(Part(kind, name, sum(i.bytes for i in items), tuple(items)))
    return tuple(sorted(parts, key=lambda p: -p.bytes))

"""Names for the buffers of a compiled step: arguments by their path, saved tensors by the tag that
they must be.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Sequence

import jax

from jaxmem._codecs.registry import parse
from jaxmem._core.actions import KEEP, RECOMPUTE, REST, Actions
from jaxmem._core.profile import BlockClass
from jaxmem._jax.primitives import RELABELLED
from jaxmem._xla.buffers import Held, Peak

_PARTS = 8  # of one argument that are told apart


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a layer saves for the backward: `bytes` of one layer, of which `layers` are alive at
    once.

    `primitive` makes it, None where that is unknown; `dtype` is in XLA's words, "" where it is
    unknown. `asked`: a plan asks for it; where everything is kept, a tag is saved only if the
    backward reads that very tensor.
    """

    name: str
    tagged: bool
    dtype: str
    bytes: int
    layers: int
    primitive: str | None
    host: bool
    asked: bool


def expected(blocks: Sequence[BlockClass], actions: Actions | None, shards: int) -> list[Saved]:
    """What the blocks save under `actions` (None: everything), by what was decided for each tag."""
    found = []
    for block in blocks:
        chosen = {REST: KEEP} if actions is None else actions.get(block.name, {})
        made = {v: e for e in block.equations for v in e.outputs}
        label = "" if len(blocks) == 1 else f" of {block.name}"
        covered = set()
        for tag in block.tags:
            choice = KEEP if chosen.get(REST) == KEEP else chosen.get(tag.name, RECOMPUTE)
            if choice == RECOMPUTE:
                continue
            primitive, equation = None, made.get(tag.value)
            while equation is not None and (equation.tag or equation.primitive in RELABELLED):
                covered.add(equation.inputs[0])
                equation = made.get(equation.inputs[0])
            if equation is not None:
                primitive = equation.primitive
            arrays, name = [jax.ShapeDtypeStruct(tag.shape, tag.dtype)], f"{tag.name}{label}"
            if choice.codec is not None:
                arrays = jax.tree.leaves(jax.eval_shape(parse(choice.codec).encode, arrays[0]))
                primitive, name = f"jit({tag.name}_encode)", f"codes of {name}"
            host, asked = choice.action.offloads, chosen.get(REST) != KEEP
            for a in arrays:
                size = -(-a.size * a.dtype.itemsize // shards)
                found.append(
                    Saved(
                        name, True, _xla_dtype(a.dtype), size, block.layers, primitive, host, asked
                    )
                )
        for v in set(block.inputs) - covered if chosen.get(REST) != KEEP else ():
            found.append(
                Saved(
                    f"input of the layer{label}",
                    False,
                    "",
                    block.values[v] // shards,
                    block.layers,
                    None,
                    False,
                    True,
                )
            )
    return found


def name_saved(full: Peak, saved: list[Saved]) -> dict[Held, tuple[str, str]]:
    """Kind and name of the buffers that are saved for the backward, by bytes, dtype and the
    operation that makes them.

    Buffers that these do not tell apart are named together, after every tag that they may be.
    """
    backward = "transpose(" in full.op
    made = [h for h in full.held if h.kind == "temporary" and (h.host or _forward(h))]
    stacks = [(h, h.shape[0]) for h in made if _is_stack(h, {s.layers for s in saved})]
    # layers unrolled in Python
    alone = [(h, 1) for h in made if backward and not h.loops and not h.handed_on]
    buckets: dict[tuple, list[Held]] = collections.defaultdict(list)
    for h, layers in stacks or alone:
        buckets[h.bytes // layers, h.dtype, h.host].append(h)
    names: dict[Held, tuple[str, str]] = {}
    for (size, dtype, host), held in buckets.items():
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
    *first, last = dict.fromkeys(s.name for s in saved if s.tagged) or [""]
    label = f"{', '.join(first)} or {last}" if first else last
    if not label:
        inputs = list(dict.fromkeys(s.name for s in saved))
        return dict.fromkeys(
            held, ("untagged", f"saved: {inputs[0]}" if inputs else "saved without a tag")
        )
    more = sum(h.bytes for h in held) > sum(s.layers * s.bytes for s in saved)
    return dict.fromkeys(
        held, ("saved", f"saved: {label}{', and others without a tag' if more else ''}")
    )


def _is_stack(h: Held, layers: set[int]) -> bool:
    """Whether a loop over layers stacks it, one layer after the other."""
    handed_on = h.handed_on or h.op.endswith("/dynamic_update_slice")
    return len(h.shape) > 1 and h.shape[0] > 1 and h.shape[0] in layers and bool(handed_on)


def _forward(h: Held) -> bool:
    return any("jvp(" in op and "transpose(" not in op for op in h.sources or (h.op,))


def _made_by(h: Held, primitive: str) -> bool:
    return any(
        primitive in op.split("/") if "(" in primitive else op.endswith(f"/{primitive}")
        for op in h.sources
    )


def operation(h: Held) -> str:
    """The last word of the JAX operation that makes a buffer, "" where XLA names none."""
    ops = [op.rpartition("/")[2] for op in (*h.sources, h.op) if op]
    return ops[0] if ops else ""


def show_array(h: Held) -> str:
    return f"{h.dtype}[{','.join(map(str, h.shape))}]"


def _xla_dtype(dtype) -> str:
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
    """The step's arguments and results by the paths that a user knows, and the classes that those
    make.
    """

    def __init__(self, traced: jax.stages.Traced, args: tuple):
        leaves = jax.tree_util.tree_leaves_with_path(args)
        info = getattr(getattr(traced.jaxpr, "jaxpr", traced.jaxpr), "debug_info", None)
        avals = traced.jaxpr.in_avals
        names = getattr(info, "arg_names", None) or [
            f"args{jax.tree_util.keystr(path)}" for path, _ in leaves
        ]
        self._names = (
            list(names) if len(names) == len(avals) else [f"args[{i}]" for i in range(len(avals))]
        )
        self._outputs = list(getattr(info, "result_paths", None) or ())
        flags = [i.donated for i in jax.tree.leaves(traced.args_info)]
        self.donated = {
            (_xla_dtype(a.dtype), a.shape) for a, given in zip(avals, flags) if given and a.ndim > 1
        }
        self._kept = {name for name, given in zip(self._names, flags) if not given}
        children: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        for name in self._names:
            root, child = self._head(name)
            children[root][child] += 1
        self._split = {
            r for r, c in children.items() if len(c) <= _PARTS and sum(c.values()) > len(c)
        }

    def name_of(self, op: str) -> str:
        """An argument's path from its name in the program: a path already, or a place among the
        flat arguments.
        """
        place = re.fullmatch(r"args\[(\d+)\]", op)
        if place and op not in self._names and int(place[1]) < len(self._names):
            return self._names[int(place[1])]
        return op or "unnamed"

    def part_of(self, name: str) -> str:
        root, child = self._head(name)
        held = child if root in self._split else root
        words = set(
            re.findall(r"[a-z]+", held.lower().removeprefix("opt_state")) + [held.lower()[:9]]
        )
        if name in self._kept:
            role = "batch"
        elif words & {"params", "param", "parameters", "weights"}:
            role = "parameters"
        elif words & {"moments", "opt", "optimizer", "opt_state", "mu", "nu", "momentum"}:
            role = "optimizer state"
        else:
            role = "arguments"
        return f"{role}: {held}"

    def output(self, index: int) -> str:
        return self._outputs[index] if 0 <= index < len(self._outputs) else ""

    @staticmethod
    def _head(name: str) -> tuple[str, str]:
        parts = re.findall(r"^[^.\[]+|\.[^.\[]+|\[[^\]]*\]", name)
        return (parts[0] if parts else name), "".join(parts[:2])

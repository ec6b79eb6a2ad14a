"""Names the buffers of a compiled step: arguments by their path, and saved tensors by their tag.

The compiled program does not contain tags. So `expected` computes from each block's graph the
arrays that the block should save under a plan, and `name_saved` matches these arrays with the
buffers by size, dtype and operation.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

import jax

from jaxmem._core.actions import KEEP, UNTAGGED, Actions, choice_of, is_whole
from jaxmem._core.profile import BlockClass
from jaxmem._model.states.places import HOST
from jaxmem._model.tags.storage import Storage, codec_of
from jaxmem._result.memory.explanation import Item, Part
from jaxmem._target.buffers.held_buffers import Held, Peak
from jaxmem._trace.primitives import RELABELLED

_PARTS = 8  # an argument with more children is one part


@dataclasses.dataclass(frozen=True)
class Saved:
    """An array that a layer saves for the backward.

    name: the array's name in the explanation.
    bytes: bytes of one layer's array on one device.
    layers: the number of layers whose arrays are alive at the same time.
    tagged: whether a tag names the array; else the array is the layer's input.
    dtype: the dtype as XLA writes it; "" if it is unknown.
    primitive: the name of the JAX operation that makes the array; None if it is unknown.
    host: whether the array is stored in host memory.
    asked: whether a plan saves the array by a choice. If everything is kept, a tag's tensor is
      saved only if the backward reads this tensor.
    """

    name: str
    bytes: int
    layers: int
    tagged: bool = False
    dtype: str = ""
    primitive: str | None = None
    host: bool = False
    asked: bool = True


def expected(blocks: Sequence[BlockClass], actions: Actions | None) -> list[Saved]:
    """Returns the arrays that the blocks save under a plan's `actions`, or without a plan if
    `actions` is None.

    blocks: the step's blocks, divided into the groups of layers that the plan's labels name.
    """
    found = []
    for block in blocks:
        chosen = {UNTAGGED: KEEP} if actions is None else actions.get(block.name, {})
        whole = is_whole(chosen)
        made_by = {v: e for e in block.equations for v in e.outputs}  # by value, its equation
        label = "" if len({b.name for b in blocks}) == 1 else f" of {block.name}"
        covered = set()  # values that are another name of a saved tag's tensor
        for tag in block.tags:
            choice = choice_of(chosen, tag.name)
            if not choice.action.stores:
                continue
            # XLA names a buffer after the operation that computes the buffer, and not after the tag
            # or the reshapes and casts that follow: go back to this operation.
            primitive, equation = None, made_by.get(tag.value)
            while equation is not None and (equation.tag or equation.primitive in RELABELLED):
                covered.add(equation.inputs[0])
                equation = made_by.get(equation.inputs[0])
            if equation is not None:
                primitive = equation.primitive
            arrays, name = [jax.ShapeDtypeStruct(tag.shape, tag.dtype)], f"{tag.name}{label}"
            if (form := codec_of(choice)) is not None:
                # Codes, scales and all other arrays of a codec. `primitive` is the name of the
                # tag's encoder.
                arrays = jax.tree.leaves(jax.eval_shape(form.encode, arrays[0]))
                primitive, name = f"jit({tag.name}_encode)", f"codes of {name}"
            for a in arrays:
                size = -(-tag.turns * a.size * a.dtype.itemsize // tag.shards)
                made = _xla_dtype(a.dtype), primitive, Storage(choice).moves(a), not whole
                found.append(Saved(name, size, block.layers, True, *made))
        # A block saves the inputs that it recomputes from, without the inputs that a tag saves.
        for v in () if whole else set(block.inputs) - covered:
            found.append(Saved(f"input of the layer{label}", block.values[v], block.layers))
    return found


def name_saved(full: Peak, saved: list[Saved], layers: set[int]) -> dict[Held, tuple[str, str]]:
    """Returns the kind and the part of each buffer that is saved for the backward, by the buffer's
    bytes, its dtype and the operation that makes it.

    Buffers with equal bytes, dtype and operation are named together, after every tag that they may
    belong to.

    full: the buffers of the compiled program.
    saved: the arrays that the program's blocks should save.
    layers: the numbers of layers of the program's blocks, blocks without a tag included.
    """
    backward = "transpose(" in full.op
    # Whether a differentiated forward computes the buffer.
    forward = lambda h: any("jvp(" in op and "transpose(" not in op for op in h.sources or (h.op,))
    candidates = [h for h in full.held if h.kind == "temporary" and (h.host or forward(h))]
    # Each buffer, and the number of layers whose tensors it contains.
    stacks = [(h, h.shape[0]) for h in candidates if _is_stack(h, layers)]
    # If layers are unrolled in Python, there are no stacks: buffers that the forward makes and that
    # are alive in the backward are saved.
    alone = [(h, 1) for h in candidates if backward and not h.loops and not h.handed_on]
    buckets: dict[tuple, list[Held]] = collections.defaultdict(list)
    for h, count in stacks or alone:
        buckets[h.bytes // count, h.dtype, h.host].append(h)
    names: dict[Held, tuple[str, str]] = {}
    for (size, dtype, host), held in buckets.items():
        # First match buffers and arrays of a known operation, then the remaining ones.
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
    """One kind and one part for all buffers of `held`. Each buffer may be any array of `saved`."""
    *first, last = dict.fromkeys(s.name for s in saved if s.tagged) or [""]
    label = f"{', '.join(first)} or {last}" if first else last
    if not label:
        inputs = list(dict.fromkeys(s.name for s in saved))
        return dict.fromkeys(
            held, ("untagged", f"saved: {inputs[0]}" if inputs else "saved without a tag")
        )
    # If the buffers have more bytes than the tags, other tensors of the same size are among them.
    more = sum(h.bytes for h in held) > sum(s.layers * s.bytes for s in saved)
    return dict.fromkeys(
        held, ("saved", f"saved: {label}{', and others without a tag' if more else ''}")
    )


def _is_stack(h: Held, layers: set[int]) -> bool:
    """Whether a loop over layers stacks one tensor per layer in the buffer.

    layers: the possible numbers of iterations of a loop over layers.
    """
    handed_on = h.handed_on or h.op.endswith("/dynamic_update_slice")
    return len(h.shape) > 1 and h.shape[0] > 1 and h.shape[0] in layers and bool(handed_on)


def _made_by(h: Held, primitive: str) -> bool:
    """Whether JAX's operation `primitive` makes the buffer. A primitive must be the last word of
    the operation's name. A call, such as "jit(up_encode)", may be any word of the name.
    """
    return any(
        primitive in op.split("/") if "(" in primitive else op.endswith(f"/{primitive}")
        for op in h.sources
    )


def operation(h: Held) -> str:
    """Returns the last word of the JAX operation that makes a buffer; "" if XLA names none."""
    ops = [op.rpartition("/")[2] for op in (*h.sources, h.op) if op]
    return ops[0] if ops else ""


def show_array(h: Held) -> str:
    """Returns a buffer's dtype and shape as XLA writes them, such as "f32[4,32]"."""
    return f"{h.dtype}[{','.join(map(str, h.shape))}]"


def _xla_dtype(dtype) -> str:
    """A dtype as XLA writes it: bfloat16 is bf16, float8_e4m3fn f8e4m3fn, int4 s4."""
    # The order matters: "uint" contains "int".
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
    """The names of a step's arguments and results, and the parts of an explanation that the
    arguments belong to. The names are paths in the user's arguments and results.

    traced: the traced step, as `jaxmem._trace.step.trace` returns it.
    args: the step's arguments.

    The attribute `donated` holds (dtype, shape) of the donated arguments of two dimensions or more.
    The attribute `hosted` holds the paths of the arguments in host memory.
    """

    def __init__(self, traced: jax.stages.Traced, args: tuple):
        leaves = jax.tree_util.tree_leaves_with_path(args)
        info = traced.jaxpr.jaxpr.debug_info
        avals = traced.jaxpr.in_avals
        names = info.arg_names or [f"args{jax.tree_util.keystr(path)}" for path, _ in leaves]
        # A step with its own way of flattening arguments has other paths. Its arguments are named
        # by their position.
        by_position = [f"args[{i}]" for i in range(len(avals))]
        self._names = list(names) if len(names) == len(avals) else by_position
        self._outputs = list(info.result_paths or ())
        kinds = [getattr(getattr(a, "sharding", None), "memory_kind", None) for _, a in leaves]
        self.hosted = {name for name, kind in zip(self._names, kinds) if kind == HOST}
        flags = [i.donated for i in jax.tree.leaves(traced.args_info)]
        self.donated = {
            (_xla_dtype(a.dtype), a.shape) for a, given in zip(avals, flags) if given and a.ndim > 1
        }
        self._kept = {name for name, given in zip(self._names, flags) if not given}
        # An argument such as a train state is split into its children, if the children are few and
        # at least one child holds several arrays.
        children: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        for name in self._names:
            root, child = self._head(name)
            children[root][child] += 1
        self._split = {
            r for r, c in children.items() if len(c) <= _PARTS and sum(c.values()) > len(c)
        }

    def name_of(self, op: str) -> str:
        """Returns an argument's path.

        op: the argument's name in the program: the path, or, for an exported step, a position among
          the flat arguments, such as "args[3]".
        """
        number = re.fullmatch(r"args\[(\d+)\]", op)
        if number and op not in self._names and int(number[1]) < len(self._names):
            return self._names[int(number[1])]
        return op or "unnamed"

    def part_of(self, name: str) -> str:
        """Returns the part that an argument belongs to: the role that the words of its path
        suggest, and the path of the root argument or of its child.
        """
        root, child = self._head(name)
        path = child if root in self._split else root
        # "opt_state" is compared by its nine letters, because the expression would split it.
        words = set(
            re.findall(r"[a-z]+", path.lower().removeprefix("opt_state")) + [path.lower()[:9]]
        )
        if name in self._kept:  # a step's state is donated, and its batch is not
            role = "batch"
        elif words & {"params", "param", "parameters", "weights"}:
            role = "parameters"
        elif words & {"moments", "opt", "optimizer", "opt_state", "mu", "nu", "momentum"}:
            role = "optimizer state"
        else:
            role = "arguments"
        return f"{role}: {path}"

    def output(self, index: int | None) -> str:
        """Returns the path of the output at `index`; "" if it is unknown."""
        return "" if index is None or index >= len(self._outputs) else self._outputs[index]

    @staticmethod
    def _head(name: str) -> tuple[str, str]:
        """The first step of a path, and its first two steps: state and state.params for the path
        state.params['w'].
        """
        parts = re.findall(r"^[^.\[]+|\.[^.\[]+|\[[^\]]*\]", name)
        return (parts[0] if parts else name), "".join(parts[:2])


Row = tuple[str, str, str, int]  # a kind, a part of it, an item of the part, and bytes

# Kinds of parts, the least reliably named kind first.
UNSURE = (
    *("packing", "other", "outside", "layer", "gradients"),
    *("untagged", "saved", "outputs", "arguments"),
)


def without(rows: list[Row], excess: int) -> list[Row]:
    """Rows of (kind, part, item, bytes) less `excess` bytes in total. These bytes are counted in
    several buffers, and XLA counts them once. They are subtracted from the least reliably named
    kinds first.
    """
    kept = []
    for row in sorted(rows, key=lambda row: UNSURE.index(row[0])):
        taken = min(excess, row[3])
        excess -= taken
        kept += [(*row[:3], row[3] - taken)] if row[3] > taken else []
    return kept


def added_up(rows: Iterable[Row]) -> tuple[Part, ...]:
    """Adds up rows by part and by item; the largest part and the largest items are first."""
    grouped: dict[tuple[str, str], dict[str, list[int]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for kind, part, item, size in rows:
        grouped[kind, part][item].append(size)
    parts = []
    for (kind, name), sizes in grouped.items():
        items = sorted(
            (Item(item, sum(s), len(s)) for item, s in sizes.items()), key=lambda i: -i.bytes
        )
        parts.append(Part(kind, name, sum(i.bytes for i in items), tuple(items)))
    return tuple(sorted(parts, key=lambda p: -p.bytes))

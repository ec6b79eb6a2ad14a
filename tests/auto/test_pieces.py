"""Pieces of a loss that does not repeat: where they are cut, and that plans save with them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import Primitive

import jaxmem
from jaxmem._core.actions import UNTAGGED
from jaxmem._model.auto.find import read
from jaxmem._model.auto.pieces import Cuts, Values, cut_positions, pieces
from jaxmem._model.layer.graph import flops, views_of
from jaxmem._trace.rewrite import Program
from jaxmem.plans import Assignment
from tests.auto.steps import NOTHING, blocks_in, layers_of
from tests.shared.compare import farthest
from tests.shared.deviceless import result
from tests.shared.foreign.unlike import chain, chunked_loss, unet

EVERYTHING = Assignment.everything()


def program_of_widths(widths: list[int], skips: list[bool]) -> Program:
    """Products of these widths; a skip adds the value before the last to a later product."""

    def loss(params, x):
        kept = [x]
        for w, skip in zip(params, skips):
            x = jnp.tanh(x @ w)
            if skip:
                x = jnp.concatenate([x, kept[-1]], axis=1)
                x = x @ jnp.ones((x.shape[1], w.shape[1]), x.dtype)
            kept.append(x)
        return (x**2).sum()

    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    params = [shape(a, b) for a, b in itertools.pairwise(widths)]
    return read(jax.make_jaxpr(loss)(params, shape(3, widths[0])))


def bytes_of(program: Program, cuts: tuple[int, ...]) -> tuple[float, float]:
    """By following each value: the bytes that cross cuts, each value once, and the bytes of the
    largest piece; infinitely many for a piece without a product. The last piece ends the program.
    """
    nodes, across, inside = program.nodes, 0.0, [0.0] * (len(cuts) - 1)
    given = {*program.inputs, *program.constants}
    for i, node in enumerate(nodes):
        if node.primitive in ("reshape", "transpose") and given.issuperset(node.reads):
            given.update(node.outputs)
        for v in node.outputs:
            readers = [j for j, other in enumerate(nodes) if v in other.reads]
            last = len(nodes) if v in program.outputs else max(readers, default=None)
            if last is None or v in given:
                continue
            nbytes = program.avals[v].size * 4
            piece = max(k for k, cut in enumerate(cuts) if cut <= i)
            if last < cuts[piece + 1]:
                inside[piece] += nbytes
            elif cuts[piece + 1] < len(nodes):
                across += nbytes
    for k, (low, high) in enumerate(itertools.pairwise(cuts)):
        if not any(flops(node) for node in nodes[low:high]):
            inside[k] = np.inf
    return across, max(inside)


@given(
    widths=st.lists(st.integers(1, 9), min_size=3, max_size=5),
    skips=st.lists(st.booleans(), min_size=4, max_size=4),
    share=st.floats(0.0, 1.0),
)
def test_no_cuts_have_fewer_bytes_across(widths, skips, share):
    """Among all cuts at the same positions whose largest piece is as small."""
    program = program_of_widths(widths, skips)
    nodes = program.nodes
    work = np.array([flops(node) for node in nodes])
    values = Values(program, views_of(program, program.inputs))
    cuts = Cuts(values, work, cut_positions(values, work, range(len(nodes))))
    positions = cuts.positions.tolist()
    middle = positions[1:-1]
    every = [
        bytes_of(program, (0, *chosen, len(nodes)))
        for count in range(len(middle) + 1)
        for chosen in itertools.combinations(middle, count)
    ]
    sizes = sorted({inside for _, inside in every if np.isfinite(inside)})
    limit = sizes[int(share * (len(sizes) - 1))]
    least, found = cuts.best(limit)
    chosen = (0, *(piece.stop for piece in found))
    across, inside = bytes_of(program, chosen)
    assert inside <= limit
    assert across == least == min(a for a, size in every if size <= limit)


MODELS = {
    "unequal widths": chain,
    "a U-Net": unet,
    "a U-Net in bfloat16": functools.partial(unet, jnp.bfloat16),
    "a chunked loss": chunked_loss,
}


@pytest.mark.quick("unequal widths", "a U-Net", "a chunked loss")
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_the_models_own(model):
    loss, params, batch = MODELS[model]()
    want = jax.jit(jax.value_and_grad(loss))(params, batch)
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(want[1]))
    near = 1e-6 if model != "a U-Net in bfloat16" else 2e-2
    for assignment in (NOTHING, EVERYTHING):
        got = jax.jit(jax.value_and_grad(jaxmem.auto(loss, assignment)))(params, batch)
        assert farthest(got, want) < near


def saved_bytes(loss, *args) -> int:
    """The bytes of the arrays that the backward of a loss reads, arguments left out."""
    pullback = jax.eval_shape(lambda *args: jax.vjp(loss, *args)[1], *args)
    shapes = [(a.shape, a.dtype) for a in jax.tree.leaves(args)]
    total = 0
    for a in jax.tree.leaves(pullback):
        if (a.shape, a.dtype) in shapes:
            shapes.remove((a.shape, a.dtype))
        else:
            total += a.size * a.dtype.itemsize
    return total


@pytest.mark.quick("unequal widths", "a U-Net", "a chunked loss")
@pytest.mark.parametrize("model", MODELS)
def test_recomputation_saves_less_than_half(model):
    loss, *args = MODELS[model]()
    least = saved_bytes(jaxmem.auto(loss, NOTHING), *args)
    assert least < 0.5 * saved_bytes(jaxmem.auto(loss, EVERYTHING), *args)


def test_parameters_are_cast_again_in_each_piece():
    """Casts are saved for the end of the loss alone, which is no piece."""
    loss, params, x = chain(batch=60)  # no width: then no activation has a kernel's shape

    def in_half_precision(params, x):
        return loss(jax.tree.map(lambda a: a.astype(jnp.bfloat16), params), x.astype(jnp.bfloat16))

    auto = jaxmem.auto(in_half_precision, NOTHING)
    pullback = jax.eval_shape(lambda p: jax.vjp(auto, p, x)[1], params)
    kinds = [(a.shape, a.dtype) for a in jax.tree.leaves(pullback)]
    cast = [i for i, (w, _) in enumerate(params) if (w.shape, jnp.bfloat16) in kinds]
    assert 0 < len(cast) < 4
    assert cast == [*range(len(params) - len(cast), len(params))]


def test_equal_pieces_share_decisions():
    def loss(params, x):
        for wide, square in params:
            x = jnp.tanh(jnp.tanh(x @ wide) @ square)
            x = jax.lax.scan(
                lambda _, row: (None, jnp.sin(row) @ jnp.ones((8, 8), row.dtype)), None, x
            )[1]
        return (x**2).sum()

    params = [(jnp.ones((8, 32)), jnp.ones((32, 8)))] * 3
    found = layers_of(loss, params, jnp.ones((4, 8)))
    of_rows = [layer for layer in found if layer.turns == 4]
    others = [layer for layer in found if layer.turns == 1]
    assert len(of_rows) == len(others) == 3
    assert len({layer.label for layer in others}) == 1


def test_layers_of_a_python_loop_beside_a_chunked_loss():
    """The chunks of the loss are a scan with matrix products, and so are not the only layers."""
    loss, params, batch = chunked_loss()
    found = layers_of(loss, params, batch)
    assert [layer.label for layer in found].count("auto") == 4
    assert [layer.turns for layer in found].count(1) == 4


@pytest.mark.parametrize("model", ["unequal widths", "a U-Net"])
def test_a_batch_of_the_closure_is_no_parameter(model):
    """The first piece has tags as its batch is an argument, and as it is not."""
    loss, params, batch = MODELS[model]()
    for first, *_ in (layers_of(loss, params, batch), layers_of(lambda p: loss(p, batch), params)):
        assert "linear" in [candidate.name for candidate in first.candidates]


def test_the_end_of_a_loss_is_no_piece():
    program = program_of_widths([8, 9, 7, 6], [False] * 3)
    found = pieces(program, [range(len(program.nodes))])
    assert found
    assert found[0].start == 0
    assert found[-1].stop < len(program.nodes)


def test_pieces_with_few_of_the_flops_are_left_alone():
    """A scan over layers has most of the FLOPs."""

    def loss(params, x):
        stem, layers, head = params
        x = jnp.tanh(jnp.tanh(x @ stem) @ stem.T) @ stem
        return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0] @ head).sum()

    params = jnp.ones((4, 64)), jnp.ones((8, 64, 64)), jnp.ones((64, 2))
    assert [layer.turns for layer in layers_of(loss, params, jnp.ones((3, 4)))] == [8]


WIDTH, ROWS = 32, 256


def squared_distances(x):
    """The squared distances of all pairs of rows: its differences are the most bytes of a loss."""
    return ((x[:, None] - x[None]) ** 2).sum(-1)


def gaussian_process(scanned: bool, distances=squared_distances, around=lambda layer: layer):
    """Layers, and the likelihood of a Gaussian process on their output. Returns the loss, its
    parameters and its batch.

    distances, around: the function of the distances, and what wraps a layer.
    """
    wrapped = around(lambda x, w: x + jnp.tanh(x @ w[0]) @ w[1])

    def loss(params, x):
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (wrapped(x, w), None), x, params)
        else:
            for i in range(4):
                x = wrapped(x, jax.tree.map(lambda a, i=i: a[i], params))
        kernel = jnp.exp(-distances(x) / WIDTH) + jnp.eye(ROWS, dtype=x.dtype)
        factor = jnp.linalg.cholesky(kernel)
        return jnp.log(jnp.diag(factor)).sum() + (factor @ x).var()

    keys = jax.random.split(jax.random.key(0), 3)
    normal = lambda key, *shape: jax.random.normal(key, shape, jnp.float32) / WIDTH**0.5
    params = normal(keys[0], 4, WIDTH, 64), normal(keys[1], 4, 64, WIDTH)
    return loss, params, normal(keys[2], ROWS, WIDTH)


@pytest.mark.parametrize("scanned", [True, False])
def test_distances_of_all_pairs_take_few_more_bytes_than_under_a_checkpoint_by_hand(scanned):
    def temporaries(loss, *args) -> int:
        compiled = jax.jit(jax.grad(loss)).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    loss, *args = gaussian_process(scanned)
    by_hand, *_ = gaussian_process(scanned, jax.checkpoint(squared_distances), jax.checkpoint)
    least = temporaries(jaxmem.auto(loss, NOTHING), *args)
    assert least <= 1.2 * temporaries(by_hand, *args)
    assert least < 0.2 * temporaries(loss, *args)
    want, got = (jax.jit(jax.grad(f))(*args) for f in (loss, jaxmem.auto(loss, NOTHING)))
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(want))
    assert farthest(got, want) < 1e-5


def test_cheap_operations_are_a_piece_if_they_hold_more_than_a_layer():
    labels = lambda loss, *args: [layer.label for layer in layers_of(loss, *args)]
    loss, params, x = gaussian_process(True)
    assert labels(loss, params, x) == ["auto", "auto_2"]

    def mean_of_squares(params, x):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, params)
        return ((x - 1) ** 2).mean()

    assert labels(mean_of_squares, params, x) == ["auto"]


def test_a_softmax_at_the_end_of_a_loss_is_no_piece():
    """Its backward reads as many bytes as the logits, which its recomputation would save."""
    _, params, x = gaussian_process(True)

    def vocabulary(params, x):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, params)
        logits = x @ jnp.ones((WIDTH, 4096), x.dtype)
        return -jax.nn.log_softmax(logits)[jnp.arange(ROWS), jnp.arange(ROWS)].mean()

    assert [layer.label for layer in layers_of(vocabulary, params, x)] == ["auto"]


def test_an_operation_without_a_derivative_is_in_no_cheap_piece():
    """It may run on values that no gradient depends on."""
    opaque = Primitive("opaque")
    opaque.def_abstract_eval(lambda x: x)

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, params)
        fixed = jax.lax.stop_gradient(x) @ jnp.ones((WIDTH, WIDTH), x.dtype)
        return x.mean() * opaque.bind(fixed[:, None] - fixed[None]).mean()

    _, params, x = gaussian_process(True)
    assert [layer.label for layer in layers_of(loss, params, x)] == ["auto"]


def test_a_checkpoint_of_the_user_beside_layers_is_a_piece():
    def loss(params, x, ends=jax.checkpoint, layers=lambda f: f, starts=lambda f: f):
        x = starts(lambda x: 2.0 * x)(x)
        stack = lambda x: jax.lax.scan(
            lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, params
        )
        x, _ = layers(stack)(x)
        return ends(lambda x: jnp.sin(jnp.cos(x)).mean())(x)

    _, params, x = gaussian_process(True)
    labels = lambda **wrapped: [
        layer.label for layer in layers_of(functools.partial(loss, **wrapped), params, x)
    ]
    assert labels() == ["auto", "auto_2"]
    assert labels(ends=lambda f: f) == ["auto"]
    assert labels(layers=jax.checkpoint) == ["auto", "auto_2"]
    assert labels(starts=jax.checkpoint) == ["auto", "auto_2", "auto_3"]
    whole = lambda params, x: jax.checkpoint(loss)(params, x)
    assert [layer.label for layer in layers_of(whole, params, x)] == ["auto"]
    for assignment, blocks in ((NOTHING, 2), (EVERYTHING, 0)):
        assert blocks_in(jax.grad(jaxmem.auto(loss, assignment)), params, x) == blocks


@pytest.mark.usefixtures("own_cache")
def test_no_budget_is_refused_that_one_kept_block_meets():
    """On a CPU, the block beside the layers may take more bytes recomputed than kept."""

    def step(params, x):
        def loss(params):
            y, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, params)
            order = jnp.argsort(x.sum(-1))
            distances = jnp.abs(y[:, None] - y[order])
            nearest = jnp.take_along_axis(distances, order[None, :, None], axis=1).mean()
            return nearest + jnp.exp(-distances).sum(-1).max(1).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    _, params, x = gaussian_process(True)
    args = params, x[:128]
    kept = {UNTAGGED: "keep"}
    bytes_of = []
    for layers, beside in itertools.product(({}, kept), repeat=2):
        build = jaxmem.auto(step)(Assignment({"auto": layers, "auto_2": beside}))
        compiled = jax.jit(build).lower(*args).compile()
        bytes_of.append(jaxmem.plans.compiled_bytes(compiled))
    budget = int(1.005 * min(bytes_of))
    plan = jaxmem.plan(jaxmem.auto(step), *args, budget=budget, actions=jaxmem.plans.LOSSLESS)
    assert plan.compiled_bytes <= budget


@pytest.mark.slow
def test_a_unet_takes_fewer_bytes_on_a_gpu(h200):
    loss, params, batch = unet(batch=32)

    def temporaries(assignment) -> int:
        step = jax.value_and_grad(jaxmem.auto(loss, assignment))
        return result(h200, step, params, batch).temp_bytes

    assert temporaries(NOTHING) < 0.75 * temporaries(EVERYTHING)

"""Outliers are those of the tensors that a step computes, whatever loops and calls it has; nothing
of the step is changed by it. Tensors, callbacks and codecs that are out of the ordinary. Numbers of
outliers, the room that they ask for, and the reasons for another plan.
"""

import dataclasses
import json

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.actions import KEEP, Choice
from jaxmem._core.reader import Reader
from jaxmem._model.codecs.outlier import OutlierSeparated, z_scores
from jaxmem._train.rectifier.counts import Outliers, counted, greatest
from jaxmem._train.rectifier.decide import overflows, rooms, rooms_of, without_room
from jaxmem._train.rectifier.track import Tracker, outliers_of
from jaxmem.errors import StepError
from tests.shared import outlier_layers as layers
from tests.shared.outlier_layers import batch, build, loss_of, oracle, parameters, same, tracked


def test_counts_are_those_of_the_tensors():
    p, x = parameters(), batch()
    found = tracked(build, p, x)
    same(found, oracle(p, x))
    (ln,) = (one for one in found if one.tag == "ln")
    assert ln.counts == (2, 0, 1)
    assert ln.places == ((3, 5), (), (7,))
    assert (ln.block, ln.step, ln.channels, ln.most) == ("block", 5, layers.WIDTH, 2)
    assert ln.rate == pytest.approx(3 / (3 * layers.WIDTH))
    assert (ln.beyond(0), ln.beyond(1), ln.beyond(2)) == (3, 1, 0)


def test_a_step_is_the_same_whether_it_is_tracked():
    p, x = parameters(), batch()
    text = lambda: str(jax.make_jaxpr(build(jaxmem.plans.Assignment.nothing()))(p, x))
    before, kept = text(), jax.tree.map(np.asarray, p)
    tracked(build, p, x)
    assert text() == before
    jax.tree.map(np.testing.assert_array_equal, p, kept)  # they are not donated


def test_layers_in_a_python_loop():
    def unrolled(plan):
        layer = jax.checkpoint(layers.block, policy=jaxmem.remat_policy(plan))

        def loss(p, x):
            for i in range(layers.LAYERS):
                x = layer(x, jax.tree.map(lambda a, i=i: a[i], p))
            return (x**2).mean()

        return lambda p, x: jax.grad(loss)(p, x)

    p, x = parameters(), batch()
    same(tracked(unrolled, p, x), oracle(p, x))


def by_microbatch(found, p, x, number):
    """Asserts that each microbatch's tensors are counted, one after the other."""
    parts = [oracle(p, part) for part in jnp.split(x, number)]
    same(found, {tag: [z for part in parts for z in part[tag]] for tag in layers.TAGS})


@pytest.mark.parametrize("inside", [True, False])
def test_microbatches(inside):
    def accumulated(plan):
        loss = loss_of(plan)

        def step(p, x):
            parts = x.reshape(2, -1, *x.shape[1:])
            if not inside:  # one derivative of a loop
                whole = lambda p: jax.lax.map(lambda part: loss(p, part), parts).mean()
                return jax.grad(whole)(p)
            zeros = jax.tree.map(jnp.zeros_like, p)
            add = lambda total, part: jax.tree.map(jnp.add, total, jax.grad(loss)(p, part))
            return jax.lax.scan(lambda *given: (add(*given), None), zeros, parts)[0]

        return step

    p, x = parameters(), batch()
    by_microbatch(tracked(accumulated, p, x), p, x, 2)


def test_parameters_that_a_loop_updates():
    """The second turn's tensors are of updated parameters, for which the backward must run."""

    def several(plan):
        step = build(plan)

        def steps(p, x):
            return jax.lax.scan(lambda p, x: (step(p, x)[0], None), p, x.reshape(2, 2, 6, -1))[0]

        return steps

    p, x = parameters(), batch()
    after = build(None)(p, x[:2])[0]
    first, second = oracle(p, x[:2]), oracle(after, x[2:])
    same(tracked(several, p, x), {t: first[t] + second[t] for t in layers.TAGS})


def test_calls_conditionals_and_custom_rules():
    @jax.custom_vjp
    def scaled(x):
        return 2 * x

    scaled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

    def called(plan):
        loss = loss_of(plan)

        def step(p, x, loud):
            def either(p):
                whole = jax.jit(loss)
                return jax.lax.cond(loud, lambda: whole(p, scaled(x)), lambda: whole(p, x))

            return jax.grad(either)(p)

        return step

    p, x = parameters(), batch()
    for loud in (True, False):
        found = tracked(called, p, x, jnp.asarray(loud))
        taken = oracle(p, 2 * x if loud else x)
        for one in found:  # both branches are there, of which one was not taken
            counts = [int((z > 3).sum()) for z in taken[one.tag]]
            assert sum(one.counts) == sum(counts)
            assert sorted(c for c in one.counts if c) == sorted(c for c in counts if c)
            assert np.isnan(one.greatest).sum() == layers.LAYERS


def test_blocks_with_labels_are_told_apart():
    def of_two(plan):
        one, other = (
            jax.checkpoint(layers.block, policy=jaxmem.remat_policy(plan, block=label))
            for label in ("encoder", "decoder")
        )

        def loss(p, x):
            first, second = (jax.tree.map(lambda a, i=i: a[i], p) for i in (0, 2))
            return (other(one(x, first), second) ** 2).mean()

        return lambda p, x: jax.grad(loss)(p, x)

    found = tracked(of_two, parameters(), batch())
    ln = {one.block: one.places for one in found if one.tag == "ln"}
    assert ln == {"encoder": ((3, 5),), "decoder": ((7,),)}


def test_a_batch_axis_of_vmap():
    def mapped(plan):
        loss = loss_of(plan)
        return lambda p, x: jax.grad(lambda p: jax.vmap(loss, (None, 1))(p, x).mean())(p)

    p, x = parameters(), batch()
    same(tracked(mapped, p, x), oracle(p, x))  # channels sum over the batch, wherever it is


@pytest.mark.standard_promotion
@pytest.mark.parametrize("kind", ["stack", "released", "auto"])
def test_steps_of_jaxmems_own(kind):
    p, x = parameters(), batch()
    if kind == "stack":

        def stacked(plan):
            def loss(p, x):
                block = lambda p, x: layers.block(x, p)
                return (jaxmem.stack(block, p, x, plan=plan) ** 2).mean()

            return lambda p, x: jax.grad(loss)(p, x)

        return same(tracked(stacked, p, x), oracle(p, x))
    if kind == "auto":  # tags are jaxmem's own there
        layer = lambda x, q: (x + jnp.tanh(x * q["gain"]) @ q["up"] @ q["down"], None)
        plain = lambda p, x: (jax.lax.scan(layer, x, p)[0] ** 2).mean()
        step = jaxmem.auto(lambda p, x: jax.grad(plain)(p, x))
        found = tracked(step, p, x)
        assert {len(one.counts) for one in found} == {layers.LAYERS}
        return None

    def released(plan):
        return jaxmem.released_step(
            jaxmem.adama(1e-3, accumulation_steps=2),
            lambda outer, x: x,
            lambda p, x: layers.block(x, p),
            lambda outer, x, batch: (x**2).mean(),
            plan=plan,
        )

    step = released(None)
    state = step.init({"layers": p})
    return by_microbatch(tracked(released, state, x), p, x, 2)


def test_values_that_are_not_finite():
    p, x = parameters(), batch().at[0, 0, 0].set(jnp.nan)
    found = tracked(build, p, x)
    assert all(one.counts[0] == 0 and np.isnan(one.greatest[0]) for one in found)
    rows = [one.to_json() for one in found]
    assert rows[0]["greatest"][0] is None


def test_what_cannot_be_tracked_is_said():
    plain = lambda plan: lambda p, x: (p, {"loss": x.sum()})
    with pytest.raises(StepError, match="has no tensor to track"):
        Tracker(plain, (parameters(), batch()))
    tracker = Tracker(build, (parameters(), batch()))
    with pytest.raises(StepError, match="traced for 4, or other shapes"):
        tracker(parameters(), batch(8))


def test_neither_the_backward_nor_the_update_is_computed():
    p, x = parameters(), batch()
    tracker = Tracker(build, (p, x))
    tracker.compile(p, x)
    own = tracker._compiled.cost_analysis()["flops"]
    forward = jax.jit(loss_of(None)).lower(p, x).compile().cost_analysis()["flops"]
    whole = jax.jit(build(None)).lower(p, x).compile().cost_analysis()["flops"]
    assert own < 1.5 * forward < 0.7 * whole
    assert tracker.bytes > sum(a.nbytes for a in jax.tree.leaves((p, x)))


def test_tensors_on_an_explicit_mesh():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    place = jax.NamedSharding(mesh, jax.P(None, None, "d"))
    x = jax.random.normal(jax.random.key(0), (4, 6, layers.WIDTH))

    def of(plan):
        block = lambda x: jnp.tanh(jaxmem.tag(jnp.sin(x), "h", kind="norm") * x)
        checkpointed = jax.checkpoint(block, policy=jaxmem.remat_policy(plan))
        return lambda x: jax.grad(lambda x: checkpointed(x).sum())(x)

    with jax.set_mesh(mesh):
        (found,) = tracked(of, jax.device_put(x, place))
    sums = np.abs(np.sin(np.asarray(x))).sum((0, 1))
    np.testing.assert_allclose(found.greatest, [(sums.max() - sums.mean()) / sums.std()], rtol=1e-5)


def test_narrow_types():
    p, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (parameters(), batch()))
    wide = jax.tree.map(lambda a: a.astype(jnp.float64), (p, x))
    (ln,) = (one for one in tracked(build, p, x) if one.tag == "ln")
    assert ln.counts == tuple(int((z > 3).sum()) for z in oracle(*wide)["ln"])


def test_a_gradient_of_each_example_has_tensors_of_its_own():
    def of(plan):
        loss = loss_of(plan)
        return lambda p, x: jax.vmap(jax.grad(loss), (None, 0))(p, x)

    p, x = parameters(), batch(2)
    found = tracked(of, p, x)
    each = [oracle(p, part[None]) for part in x]
    for one in found:  # layer by layer, and in each the examples
        scores = [of_one[one.tag][i] for i in range(layers.LAYERS) for of_one in each]
        assert one.counts == tuple(int((z > 3).sum()) for z in scores)


def test_codecs_that_were_asked_for_say_what_is_counted():
    def of(plan):
        def layer(x, p):
            return x + jaxmem.tag(jnp.sin(x @ p["up"]), "h") @ p["down"]  # of no kind

        return jax.grad(loss_of(plan, layer))

    args = {k: v for k, v in parameters().items() if k != "gain"}, batch()
    with pytest.raises(StepError, match="has no tensor to track"):
        Tracker(of, args)
    tracker = Tracker(of, args, "outlier_separated(capacity=1)")
    (found,) = tracker.read(1, tracker(*args))
    assert found.tag == "h"
    kinds = ("norm", "linear", "gelu", "residual")
    with pytest.raises(StepError, match="has no tensor to track"):
        Tracker(build, (parameters(), batch()), dict.fromkeys(kinds, "grouped_symmetric()"))


def read_by_recomputation_alone(x, p):
    """What another tag stands for is read by no backward, and may be compressed all the same."""
    h = jaxmem.tag(x @ p["up"], "h", kind="linear")
    return jaxmem.tag(h @ p["down"] + x, "out", kind="residual")


def of_several_widths(x, p):
    h = jaxmem.tag(jnp.sin(x @ p["up"]), "h", kind="linear")
    empty = jaxmem.tag(x[..., :0], "empty", kind="norm").sum()
    return x + jaxmem.tag(jnp.sin(h @ p["down"]), "h", kind="linear") + empty


@pytest.mark.parametrize(
    ("layer", "widths"),
    [
        (read_by_recomputation_alone, {("h", layers.HIDDEN), ("out", layers.WIDTH)}),
        (of_several_widths, {("h", layers.HIDDEN), ("h", layers.WIDTH), ("empty", 0)}),
    ],
)
def test_every_tensor_is_counted(layer, widths):
    p = {k: v for k, v in parameters().items() if k != "gain"}
    found = tracked(lambda plan: jax.grad(loss_of(plan, layer)), p, batch())
    assert {(one.tag, one.channels) for one in found} == widths


def test_callbacks_are_made_once():
    said = []

    def of(plan, callback):
        def layer(x, p):
            callback(x)
            return layers.block(x, p)

        return jax.grad(loss_of(plan, layer))

    p, x = parameters(), batch()
    debugging = lambda x: jax.debug.callback(lambda y: said.append(y), x.sum())
    found = tracked(lambda plan: of(plan, debugging), p, x)
    jax.effects_barrier()
    assert found
    assert not said

    def reading(plan):
        def step(p, x):
            shape = jax.ShapeDtypeStruct((), x.dtype)
            one = jax.experimental.io_callback(lambda: np.float64(1.0), shape)
            return jax.grad(loss_of(plan))(p, x * one)

        return step

    with pytest.raises(StepError, match="io_callback, which counting would call once more"):
        tracked(reading, p, x)


# Each shape is compiled, so there are few: one channel, too few channels for an outlier, and more.
SHAPES = st.tuples(st.sampled_from([1, 5]), st.sampled_from([1, 2, 10, 11, 60]))


@hypothesis.given(arrays.arrays(np.float64, SHAPES, elements=st.floats(-1e3, 1e3)))
def test_scores_are_numpys(x):
    z = np.asarray(z_scores(jnp.asarray(x)))
    sums = np.abs(x).sum(0)
    deviation = sums.std()
    if deviation > 1e-9 * max(sums.max(), 1e-300):
        np.testing.assert_allclose(z, (sums - sums.mean()) / deviation, rtol=1e-4, atol=1e-4)
        assert int((z > 3).sum()) <= (x.shape[-1] - 1) // 10  # Cantelli


@hypothesis.given(st.integers(0, 5000))
def test_room_is_enough_and_at_most_half_too_much(count):
    room = OutlierSeparated().with_room_for(count).capacity
    assert count <= room <= max(1.5 * count, count + 1)
    assert OutlierSeparated().with_room_for(room).capacity == room
    below = OutlierSeparated().with_room_for(max(0, count - 1)).capacity
    assert below <= room


def test_a_codec_keeps_its_other_fields():
    codec = OutlierSeparated(group=32, scale="float32", capacity=1, stochastic=True, seed=4)
    assert codec.with_room_for(5) == dataclasses.replace(codec, capacity=6)


def test_what_was_counted_is_read_back():
    scores = [
        np.array([[0.0, 4.0, 3.5], [0.0, 1.0, np.nan]], np.float32),
        np.array([9.0, 0.0, 0.0]),
    ]
    one = outliers_of(7, "block", "up", scores)
    assert one.counts == (2, 0, 1)
    assert one.places == ((1, 2), (), (0,))
    assert one.greatest[0] == 4.0
    assert one.greatest[2] == 9.0
    assert np.isnan(one.greatest[1])
    back = Reader().read(Outliers, json.loads(json.dumps(one.to_json(), allow_nan=False)))
    assert back == dataclasses.replace(one, greatest=back.greatest)
    np.testing.assert_equal(back.greatest, one.greatest)
    assert (one.most, one.rate, one.beyond(1)) == (2, pytest.approx(3 / 9), 1)


def test_counts_are_those_of_a_tags_tensors():
    of = lambda tag, counts: Outliers(1, "b", tag, 40, counts, (0.0,) * len(counts), ())
    found = counted([of("x", (1, 4)), of("y", (0,)), of("x", (2,))])
    assert found == {"b": {"x": [1, 4, 2], "y": [0]}}
    assert greatest([found, {"b": {"y": [3]}, "c": {"x": [1]}}]) == {
        "b": {"x": 4, "y": 3},
        "c": {"x": 1},
    }
    assert rooms({"b": {"x": 5}}) == {("b", "x"): 6}


def test_overflows_are_of_the_layers_that_a_plan_compresses():
    codec = lambda n: Choice("compress", f"outlier_separated(capacity={n})")
    grouped = Choice("compress", "grouped_symmetric()")
    actions = {
        "block[0:2]": {"x": codec(8), "y": KEEP, "z": grouped},
        "block[2:6]": {"x": codec(4), "w": codec(2)},
        "head": {"x": codec(1)},
    }
    # Two microbatches of six layers, each with other counts.
    numbered = list(range(100, 112))
    counts = {"block": {"x": numbered, "w": numbered}, "head": {"x": [100, 101]}}
    assert list(rooms_of(actions, [counts])) == [
        ("block", "x", 8, [100, 101, 106, 107]),
        ("block", "x", 4, [102, 103, 104, 105, 108, 109, 110, 111]),
        ("block", "w", 2, [102, 103, 104, 105, 108, 109, 110, 111]),
        ("head", "x", 1, [100, 101]),
    ]
    # The first two layers have room for more.
    x = [8, 8, 4, 4, 4, 4, 8, 8, 4, 4, 5, 4]
    counts = {"block": {"x": x, "y": [30] * 12, "z": [30] * 12, "w": [9, 9, 2, 2, 2, 2] * 2}}
    assert overflows(actions, [counts]) == ["block/x has 5 outliers and room for 4"]
    assert without_room(actions, counts) == 1
    assert overflows(actions, [{"head": {"x": [1, 1]}}]) == []
    assert without_room(actions, {"head": {"x": [3, 2]}}) == 3

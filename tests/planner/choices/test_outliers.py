"""Plans for counts of outliers: codecs have room for them, and prices and bytes are theirs."""

import pytest

import jaxmem
from jaxmem._core.actions import Action
from jaxmem._model.codecs.registry import parse
from jaxmem._train.rectifier.decide import rooms_of
from jaxmem.errors import TagError
from tests.shared.outlier_layers import batch, build, parameters


@pytest.fixture(scope="module")
def args():
    return parameters(), batch(64)


def planned(args, budget, **given):
    only = {"actions": [Action.COMPRESS, Action.RECOMPUTE]}
    return jaxmem.plan(build, *args, budget=budget, **(only | given))


def test_codecs_have_room_for_what_was_counted(args):
    whole = jaxmem.plan(build, *args)
    counts = {"block": {"in": 0, "ln": 3, "up": 7}}
    plan = planned(args, int(0.8 * whole.baseline_bytes), outliers=counts)
    found = {tag: room for _, tag, room, _ in rooms_of(plan.actions, ())}
    assert found, plan
    assert found == {t: {"in": 0, "ln": 3, "up": 8, "act": 8}[t] for t in found}
    for row in plan.rows:  # bytes are those of the codec that was chosen
        if row.choice.action is Action.COMPRESS:
            assert row.bytes_after == parse(row.choice.codec).nbytes(row.shape, row.dtype)
    assert jaxmem.verify(plan, build, *args).compiled_bytes == plan.compiled_bytes


def test_counts_of_tags_that_are_not_there_change_nothing(args):
    least = int(0.9 * jaxmem.plan(build, *args).baseline_bytes)
    counts = {"other": {"ln": 3}, "block": {"none": 9}}
    assert planned(args, least, outliers=counts).actions == planned(args, least).actions


@pytest.mark.parametrize("wrong", [3, {"block": 3}, {"block": {"ln": -1}}, {"block": {"ln": 1.5}}])
def test_counts_that_are_none_are_refused(args, wrong):
    with pytest.raises(TagError, match="`outliers` is .*expected numbers of channels"):
        planned(args, 10**9, outliers=wrong)

"""The least budget that a plan is found for is the step's own: neither measured times nor what was
planned before decide whether a budget is refused.
"""

import dataclasses
import itertools
import random

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from benchmarks.shared.steps import MODELS, shapes, step_of
from jaxmem._cost.profile import profile as profile_module
from jaxmem.errors import BudgetError
from tests.shared.foreign.size import Size

pytestmark = [
    pytest.mark.jax_defaults,
    pytest.mark.timeout(3600),
    # Layers of a Python loop, of which jaxlib 0.10.2 warns, have a least budget too.
    pytest.mark.filterwarnings("default::jaxmem.errors.JaxmemWarning"),
]

SIZE = Size(width=64, heads=4, layers=6, batch=8, sequence=96, vocab=256)
NAMES = (
    "gemma, a Python loop", "gemma, a scan", "gemma, a scan of checkpoints",
    "microbatches, a chunked loss", "names twice in a layer", "mixture of experts",
    "encoder and decoder", "Linen, nn.scan", "Equinox, a scan", "Transformers, GPT-2",
)  # fmt: skip
# What was planned before, as shares of the bytes with everything kept, and with which actions.
HISTORIES = {
    "nothing": (),
    "a plan for much": ((0.9, None),),
    "plans for less and less": ((0.8, None), (0.6, None), (0.5, None)),
    "lossless plans": ((0.7, jaxmem.plans.LOSSLESS), (0.5, jaxmem.plans.LOSSLESS)),
}
NEARLY = 0.01


def small(s: Size):
    """A layer of three tensors that are worth a tag, for which every assignment is soon tried."""

    def loss(params, x):
        layer = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)
        return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

    up, down = jnp.ones((s.layers, 64, 256)), jnp.ones((s.layers, 256, 64))
    return loss, {"up": up, "down": down}, (jnp.ones((512, 64)),)


def planned(step, args, budget, actions=None):
    return jaxmem.plan(jaxmem.auto(step), *args, budget=int(budget), actions=actions)


def refused(step, args, budget, actions=None) -> int | None:
    """The least bytes that a refusal names; None where a plan is found."""
    try:
        plan = planned(step, args, budget, actions)
    except BudgetError as error:
        return error.least_bytes
    assert plan.compiled_bytes <= budget
    return None


def least_budget(step, args) -> int:
    """Asks for what the refusal of an impossible budget names, and for less until it is refused."""
    arguments = refused(step, args, 1)
    assert arguments is not None
    least = refused(step, args, 1.01 * arguments)
    assert least is not None, "next to nothing beside the arguments"
    assert refused(step, args, least) is None, "what compiled is found again"
    while (named := refused(step, args, (1 - NEARLY) * least)) is None:
        least = int((1 - NEARLY) * least)
    assert named > (1 - NEARLY) * least
    return least


def scaled(own, seed: int):
    """`job_times` with times multiplied by 0.5 to 2, each otherwise."""
    draw = random.Random(seed)

    def job_times(*args):
        times = own(*args)
        seconds = [s * 2 ** draw.uniform(-1, 1) for s in times.seconds]
        return dataclasses.replace(times, seconds=seconds)

    return job_times


def found(make, history, factor, tmp_path, monkeypatch) -> int:
    """The least budget after a history, in a cache of its own."""
    loss, params, rest = make(SIZE)
    step, args = step_of(loss), shapes((params, *rest))
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        if factor is not None:
            patch.setattr(profile_module, "job_times", scaled(profile_module.job_times, factor))
        kept = 0
        for share, actions in HISTORIES[history]:
            kept = kept or planned(step, args, 2**40).baseline_bytes
            refused(step, args, share * kept, actions)
        return least_budget(step, args)


def check(make, cases, tmp_path, monkeypatch) -> None:
    all_found = {
        case: found(make, *case, tmp_path / str(i), monkeypatch) for i, case in enumerate(cases)
    }
    assert max(all_found.values()) <= (1 + NEARLY) * min(all_found.values()), all_found


@pytest.mark.core
def test_other_times_and_an_earlier_plan_refuse_the_same_budgets(tmp_path, monkeypatch):
    cases = [("nothing", None), ("a plan for much", 1)]
    check(small, cases, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_least_budget_is_the_steps_own(name, tmp_path, monkeypatch):
    histories = ("nothing", "plans for less and less", "lossless plans")
    cases = [*itertools.product(histories, [None]), ("nothing", 1), ("a plan for much", 2)]
    check(MODELS[name], cases, tmp_path, monkeypatch)

"""Changes that are weighed by the whole step: steps are priced here as pieces and a planted error.
At the end of a search, what was known by its buffers is compiled whole. No compiler is asked: what
steps take is planted. Seconds of whole steps: their sources, and how certain a difference is. Of
the steps that were run, a lossy one is taken only for a gain that one would notice.
"""

import dataclasses
import itertools
import types

import hypothesis
import hypothesis.strategies as st
import pytest

import jaxmem._planner.search.search as search_module
from jaxmem._core.actions import KEEP, OFFLOAD, RECOMPUTE, UNTAGGED
from jaxmem._core.profile import Option
from jaxmem._planner.search import candidates
from jaxmem._planner.search.candidates import hand_policies
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._planner.search.measure import Runs, fastest_run
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.step_time import step_time_of
from jaxmem._planner.search.trial import Limits, Trial
from jaxmem._planner.search.whole_steps import refine_by_whole_steps
from jaxmem._planner.solve.cost import effective, evaluate
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.devices.target import Target
from jaxmem.errors import SolverError, StepError
from tests.shared import profiles, searches
from tests.shared.independent import independent
from tests.shared.profiles import INT4, block, chain, profile

STATIC, OUTSIDE = 1000, 100.0  # bytes of arguments, and seconds of what no block holds


class Steps:
    """Weighs steps of a profile whose choices take `errors` more seconds than it says."""

    def __init__(self, made, errors):
        self.made, self.errors, self.weighed, self.refused = made, errors, [], ()
        self.backend = types.SimpleNamespace(
            stops_at_buffers=True, parallel_compiles=2, target=Target.parse("v5e")
        )

    def step(self, actions):
        cost = evaluate(self.made, actions)
        chosen = effective(self.made, actions, cost)
        longer = sum(self.errors.get((b, t, c), 0.0) for b in chosen for t, c in chosen[b].items())
        total = STATIC + cost.saved_bytes
        seconds = OUTSIDE + cost.seconds + longer - cost.host_seconds
        told = Compiled(total, STATIC, 0, 0, 0, cost.host_bytes, seconds, 0, 0, 0.0)
        return CompiledStep(actions, told)

    def try_compile_buffers(self, *many, counted):
        assert not counted
        self.weighed += many
        refused = lambda actions: effective(self.made, actions) in self.refused
        return [StepError("no") if refused(a) else self.step(a) for a in many]


def polished(made, errors, room, start, host_room=10**9, refused=()):
    """The trials of a search that found `start`, polished, and what weighed them."""
    steps = Steps(made, errors)
    steps.refused = refused
    trial = lambda actions: Trial(steps.step(actions), evaluate(made, actions), 0)
    limits = Limits(room, room, host_room)
    everything = {b.name: {UNTAGGED: KEEP} for b in made.blocks}
    search = searches.search(made, limits, trial(everything), [trial(start)], steps)
    refine_by_whole_steps(search)
    best = min(search.fitting, key=lambda t: t.xla_seconds + t.cost.doubt_seconds, default=None)
    return best, search, steps


def pair(**tags):
    """Two tensors of a layer, each kept for 10 bytes or made again by an operation of its own."""
    keep = [Option(KEEP, 10, 0, 0.0)]
    return independent({tag: (seconds, 10, keep) for tag, seconds in tags.items()})


def test_what_is_kept_in_the_place_of_another_is_found():
    """There is room for one of two tensors. The profile takes the first for dearer to make, and
    it is the second; no change of one tag alone gets from one to the other.
    """
    made = pair(u=2.0, v=1.0)
    errors = {("block", "v", RECOMPUTE): 3.0}
    best, _, _ = polished(made, errors, STATIC + 15, {"block": {"u": KEEP}})
    assert effective(made, best.actions)["block"] == {"u": RECOMPUTE, "v": KEEP}


def test_what_is_offloaded_faster_than_its_price_is_found():
    keep, offload = Option(KEEP, 10, 0, 0.0), Option(OFFLOAD, 0, 10, 5.0)
    made = independent({"u": (2.0, 10, [keep, offload]), "v": (1.0, 10, [keep, offload])})
    made = dataclasses.replace(made, link_bytes_per_second=1000.0)
    errors = {("block", "v", OFFLOAD): -4.5}
    best, _, _ = polished(made, errors, STATIC + 15, {"block": {"u": KEEP}})
    assert effective(made, best.actions)["block"] == {"u": KEEP, "v": OFFLOAD}


def test_a_change_that_waits_long_for_the_host_is_not_weighed():
    keep, offload = Option(KEEP, 10, 0, 0.0), Option(OFFLOAD, 0, 10, 50.0, 50.0)
    made = independent({"u": (2.0, 10, [keep]), "v": (1.0, 10, [keep, offload])})
    _, _, steps = polished(made, {}, STATIC + 15, {"block": {"u": KEEP}})
    assert all(OFFLOAD not in a["block"].values() for a in steps.weighed)


def test_what_was_weighed_is_not_weighed_again_and_nothing_plainly_too_large_is():
    made = pair(u=2.0, v=1.0)
    _, search, steps = polished(made, {}, STATIC + 15, {"block": {"u": KEEP}})
    stored = [repr(sorted(effective(made, a)["block"].items())) for a in steps.weighed]
    assert len(stored) == len(set(stored))
    # Both tensors are kept once, as the policy that keeps every tag, and never as a change.
    assert sum(evaluate(made, a).saved_bytes == 20 for a in steps.weighed) == 1
    assert len(search.plan_trials) == 1 + len(steps.weighed)


def test_what_is_not_compiled_is_left_out_and_others_are_weighed():
    made = pair(u=2.0, v=1.0)
    errors = {("block", "v", RECOMPUTE): 3.0}
    best_one = {"block": {"u": RECOMPUTE, "v": KEEP}}
    start, room = {"block": {}}, STATIC + 15
    best, search, steps = polished(made, errors, room, start, refused=[best_one])
    assert effective(made, best.actions)["block"] == {"u": KEEP, "v": RECOMPUTE}
    assert [effective(made, a) for a in search.refused] == [best_one]
    assert sum(effective(made, a) == best_one for a in steps.weighed) == 1


def test_a_plan_that_was_found_outlives_a_solver_that_finds_none(monkeypatch):
    def none_in_time(_):
        raise SolverError("the solver stopped")

    monkeypatch.setattr("jaxmem._planner.search.candidates.solve_fastest", none_in_time)
    made = pair(u=2.0, v=1.0)
    best, _, steps = polished(made, {}, STATIC + 15, {"block": {}})
    assert effective(made, best.actions)["block"] == {"u": KEEP, "v": RECOMPUTE}
    assert steps.weighed, "changes of one tag are"


def test_where_everything_is_kept_every_tag_but_one_is_tried():
    made = pair(u=2.0, v=1.0)
    # Whatever is kept by tags is slow: the step as it is remains the best.
    errors = {("block", tag, KEEP): 50.0 for tag in "uv"}
    errors |= {("block", tag, RECOMPUTE): 50.0 for tag in "uv"}
    best, search, steps = polished(made, errors, STATIC + 100, {"block": {}})
    assert best is search.baseline
    tried = [effective(made, a)["block"] for a in steps.weighed]
    assert {"u": RECOMPUTE, "v": KEEP} in tried
    assert {"u": KEEP, "v": RECOMPUTE} in tried


def test_nothing_is_weighed_where_a_whole_compile_alone_tells():
    made = pair(u=2.0, v=1.0)
    steps = Steps(made, {})
    steps.backend.stops_at_buffers = False
    everything = {"block": {UNTAGGED: KEEP}}
    start = Trial(steps.step(everything), evaluate(made, everything), 0)
    refine_by_whole_steps(searches.search(made, Limits(10**6, 10**6, 0), start, compiler=steps))
    assert not steps.weighed


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(profiles.profiles(), st.data())
def test_the_best_is_no_slower_than_the_start_a_policy_or_a_change_of_one_tag(made, data):
    open_to = profiles.open_to(made)
    errors = {
        (*key, choice): data.draw(st.integers(-20, 40)) / 10
        for key, choices in open_to.items()
        for choice in choices
    }
    start = {b.name: {} for b in made.blocks}
    for (label, tag), choices in open_to.items():
        start[label][tag] = data.draw(st.sampled_from(choices))
    more = st.integers(0, 200)
    room = STATIC + evaluate(made, start).saved_bytes + data.draw(more)
    host_room = evaluate(made, start).host_bytes + data.draw(more)
    best, search, steps = polished(made, errors, room, start, host_room)
    assert best.total <= room
    assert best.cost.host_bytes <= host_room
    seconds = lambda actions: (
        steps.step(actions).compiled.xla_seconds
        + sum((evaluate(made, actions).host_seconds, evaluate(made, actions).doubt_seconds))
    )
    now = seconds(best.actions)
    assert now <= seconds(start) + 1e-9
    unlimited = candidates.solve_fastest(ActionProblem(made, None, host_room))
    near = [best.actions, unlimited.actions, *hand_policies(made).values()]
    for (label, tag), choice in itertools.product(open_to, (KEEP, RECOMPUTE)):
        if choice in open_to[label, tag]:
            near.append(best.actions | {label: best.actions.get(label, {}) | {tag: choice}})
    gain = 1e-3 * search.baseline.xla_seconds
    for other in near:
        if any(UNTAGGED in tags for tags in other.values()):
            continue
        cost = evaluate(made, other)
        if STATIC + cost.saved_bytes <= room and cost.host_bytes <= host_room:
            assert now <= seconds(other) + gain


BYTES = {"u": 40, "v": 39, "w": 10}  # of each tensor, the dearest to make first


class Whole(Steps):
    """Compiled whole, every step takes `more` bytes than its buffers."""

    compiles = 0

    def __init__(self, made, more, errors=()):
        super().__init__(made, dict(errors))
        self.more, self.proved = more, []

    def try_compile_buffers(self, *many, counted=True):
        return super().try_compile_buffers(*many, counted=False)

    def compile_fully(self, step):
        self.proved.append([*step.actions["block"]])
        total = step.compiled.total_bytes + self.more
        compiled = dataclasses.replace(step.compiled, total_bytes=total)
        return dataclasses.replace(step, compiled=compiled)


def settled(more, room, monkeypatch):
    """What a search ends with that found how to keep any one of the tensors."""
    equations, options = [], {}
    for i, (name, seconds) in enumerate(zip(BYTES, (9.0, 8.0, 1.0))):
        equations += [([0], [2 * i + 1], seconds, None), ([2 * i + 1], [2 * i + 2], 0.0, name)]
        options[name] = [Option(KEEP, BYTES[name], 0, 0.0)]
    sizes = [0, *(size for name in BYTES for size in (BYTES[name],) * 2)]
    made = profile(block(equations, [2, 4, 6], sizes, options))
    steps = Whole(made, more)
    trial = lambda actions: Trial(steps.step(actions), evaluate(made, actions), 0)
    limits = Limits(room, room, 0)
    tried = [trial({"block": {name: KEEP}}) for name in BYTES]
    search = searches.search(
        made, limits, trial({"block": dict.fromkeys(BYTES, KEEP)}), tried, steps
    )
    monkeypatch.setattr(Search, "compiles_left", 0)
    monkeypatch.setattr(search_module, "compile_baseline", lambda search, arguments: None)
    monkeypatch.setattr(search_module, "refine_by_whole_steps", lambda search: {})
    search_module.find_plan(search, STATIC)
    best = None if search.best is None else [*search.best.actions["block"]]
    return best, steps.proved


@pytest.mark.parametrize(
    ("more", "room", "best", "proved"),
    [
        (0, STATIC + 40, "u", "u"),
        # What is as near to the room as one that did not fit is not compiled, since each would cost
        # a whole compile. What has room for as much more is, though it is slower.
        (3, STATIC + 41, "w", "uw"),
        # It is compiled where nothing else is left.
        (35, STATIC + 41, None, "uvw"),
    ],
)
def test_what_fits_whole_is_returned(more, room, best, proved, monkeypatch):
    found, compiled = settled(more, room, monkeypatch)
    assert found == (best and [best])
    assert sorted(compiled) == [[name] for name in proved]


def test_a_second_search_returns_the_plan_of_the_first(monkeypatch):
    """Everything kept fits, and prices find no faster plan. Whole steps find one: v is kept for
    nothing.
    """
    made = pair(u=2.0, v=1.0)
    errors = {("block", UNTAGGED, KEEP): 5.0, ("block", "u", KEEP): 4.0}
    monkeypatch.setattr(search_module, "compile_baseline", lambda search, arguments: None)

    def found(recalled):
        steps = Whole(made, 0, errors)
        kept = Trial(steps.step({"block": EVERYTHING}), evaluate(made, {"block": EVERYTHING}), 0)
        limits = Limits(STATIC + 100, STATIC + 100, 0)
        search = searches.search(made, limits, kept, [], steps, recalled=recalled)
        search_module.find_plan(search, STATIC)
        return search

    first = found([])
    assert effective(made, first.best.actions)["block"] == {"u": RECOMPUTE, "v": KEEP}
    second = found(first.plan_trials)
    assert effective(made, second.best.actions) == effective(made, first.best.actions)
    assert len(second.compiler.weighed) < len(first.compiler.weighed)


def planted(made, more, room, start, monkeypatch) -> Search:
    """A search from the tags `start`, for a profile whose steps take `more(tags)` bytes of working
    memory.
    """
    steps = Whole(made, 0)
    steps.backend.stops_at_buffers = False
    plain = steps.step

    def step(actions):
        done = plain(actions)
        total = done.compiled.total_bytes + more(actions["block"])
        return dataclasses.replace(
            done, compiled=dataclasses.replace(done.compiled, total_bytes=total)
        )

    steps.step = step
    trial = lambda tags: Trial(step({"block": tags}), evaluate(made, {"block": tags}), 0)
    limits = Limits(STATIC + room, STATIC + room, 0)
    monkeypatch.setattr(search_module, "compile_baseline", lambda search, arguments: None)
    return searches.search(made, limits, trial(EVERYTHING), [trial(start)], steps)


def test_the_search_goes_on_if_the_least_bytes_fit_against_the_prediction(monkeypatch):
    """The first guess, which keeps u, takes 9000 bytes of working memory, so that no plan is
    expected to fit. Plans without u take none.
    """
    keep = [Option(KEEP, 1000, 0, 0.0)]
    made = independent({"u": (9.0, 1000, keep), "v": (8.0, 1000, keep), "w": (1.0, 1000, keep)})
    more = lambda tags: 9000 * (tags.get("u") == KEEP or UNTAGGED in tags)
    search = planted(made, more, 1500, {"u": KEEP}, monkeypatch)
    search_module.find_plan(search, STATIC)
    assert effective(made, search.best.actions)["block"] == {
        "u": RECOMPUTE,
        "v": KEEP,
        "w": RECOMPUTE,
    }


def test_a_solution_that_is_predicted_to_exceed_the_budget_by_little_is_compiled(monkeypatch):
    """A step takes 1000 bytes of working memory without u, and 200 if u is kept."""
    keep = [Option(KEEP, 1000, 0, 0.0)]
    made = independent({"u": (9.0, 1000, keep), "v": (8.0, 1000, keep)})
    more = lambda tags: 200 if tags.get("u") == KEEP else 1000
    search = planted(made, more, 1950, {}, monkeypatch)
    search_module.find_plan(search, STATIC)
    assert effective(made, search.best.actions)["block"] == {"u": KEEP, "v": RECOMPUTE}


class Estimated(searches.NoEstimates):
    """Estimates by the choice for u. The estimate of the compressed u errs."""

    def estimate(self, actions, purpose="others") -> int | None:
        if purpose != "least":
            return None
        choice = actions["block"].get("u", RECOMPUTE)
        return {KEEP: 500, RECOMPUTE: 600, INT4: 100}[choice]


def test_a_budget_that_lossless_actions_meet_is_not_refused_with_codecs(monkeypatch):
    """Steps without u kept take 9000 bytes of working memory. The estimates find the kept tensor
    smaller than the recomputed one, and the compressed one much smaller than both.
    """
    options = [Option(KEEP, 10, 0, 0.0), Option(INT4, 5, 0, 1.0, lossy=True)]
    made = independent({"u": (9.0, 10, options)})
    search = planted(made, lambda tags: 9000 * (tags.get("u") != KEEP), 100, {}, monkeypatch)
    search.estimates = Estimated(search.compiler, made)
    search_module.compile_least(search)
    assert [t.actions["block"]["u"] for t in search.fitting] == [KEEP]


SMALLEST = STATIC + BYTES["w"]


@pytest.mark.parametrize(
    ("more", "room", "best", "proved"),
    [
        (-1, SMALLEST - 1, "w", "w"),
        (-30, SMALLEST - 2, "w", "w"),
        (-1, SMALLEST - 2, None, "wvu"),
        (0, int(0.94 * SMALLEST), None, ""),
    ],
)
def test_what_takes_less_compiled_whole_than_its_buffers_is_not_refused(
    more, room, best, proved, monkeypatch
):
    """The nearest to the room is asked first, and nothing that exceeds it by far."""
    monkeypatch.setattr(search_module, "compile_least", lambda search: None)
    assert settled(more, room, monkeypatch) == (best and [best], [[name] for name in proved])


MADE = dataclasses.replace(profile(chain(runs=10), link=100.0), uncertainty=0.5)
EVERYTHING = {UNTAGGED: KEEP}


def trial(tags, xla_seconds=None):
    actions = {"block": tags}
    compiled = Compiled(100, 40, 50, 40, 30, 0, xla_seconds, 0, 0, 1.0)
    return Trial(CompiledStep(actions, compiled), evaluate(MADE, actions), 100)


def step_time(baseline=None, measured=None):
    kept = dataclasses.replace(trial(EVERYTHING, baseline), measured_seconds=measured)
    return step_time_of(MADE, kept, Target.parse("h200"))


def test_a_run_tells_more_than_an_estimate_and_that_more_than_pieces():
    assert (step_time(20.0, 30.0).base, step_time(20.0, 30.0).source) == (30.0, "measured")
    assert (step_time(20.0).base, step_time(20.0).source) == (20.0, "xla")
    assert step_time().source == "pieces"
    assert step_time().base > MADE.step_seconds, "and what is outside of blocks"


def test_a_plan_costs_or_gains_what_its_pieces_do():
    now = step_time(measured=30.0)
    kept, coded, nothing = trial({"u": KEEP, "v": KEEP}), trial({"u": INT4}), trial({})
    for one in (kept, coded, nothing):
        apart = one.cost.seconds - trial(EVERYTHING).cost.seconds
        assert now.of(one) == pytest.approx(30.0 + apart)
    assert now.of(nothing) > 30.0
    assert now.seconds(trial(EVERYTHING).cost) == 30.0
    assert step_time(measured=1e-9).of(trial(EVERYTHING)) >= 0.0


def test_a_compiled_step_waits_for_host_memory_as_its_schedule_says():
    """A schedule that is not known waits as the profile's prices say."""
    unknown = trial({"u": OFFLOAD}, xla_seconds=7.0)
    assert unknown.cost.host_seconds > 0
    assert unknown.xla_seconds == 7.0 + unknown.cost.host_seconds
    compiled = dataclasses.replace(unknown.step.compiled, host_seconds=2.0)
    known = dataclasses.replace(unknown, step=CompiledStep(unknown.actions, compiled))
    assert known.xla_seconds == 9.0
    assert step_time(20.0).of(known) == 9.0


def test_estimates_of_whole_steps_are_compared_with_each_other_alone():
    told = trial({}, xla_seconds=7.0)
    assert step_time(20.0).of(told) == 7.0
    assert step_time(20.0, measured=30.0).of(told) != 7.0, "the other is measured"
    assert step_time().of(told) != 7.0
    untold = step_time(20.0).of(trial({}))
    assert untold == pytest.approx(20.0 + trial({}).cost.seconds - trial(EVERYTHING).cost.seconds)


def test_copies_to_the_host_are_added_to_an_estimate_that_has_none():
    moved = trial({"u": OFFLOAD, "v": KEEP}, xla_seconds=7.0)
    exposed = sum(10 * cost.exposed_seconds for cost in moved.cost.blocks)
    assert moved.cost.host_seconds == pytest.approx(10 * 0.2 + exposed)
    assert moved.xla_seconds == pytest.approx(7.0 + moved.cost.host_seconds)


def test_what_both_steps_do_is_not_uncertain():
    now = step_time(measured=30.0)
    assert now.uncertainty_of(trial(EVERYTHING).cost) == 0.0
    kept, nothing = now.uncertainty_of(trial({"u": KEEP}).cost), now.uncertainty_of(trial({}).cost)
    everything = trial(EVERYTHING).cost.seconds  # of keeping alone
    assert nothing == pytest.approx(0.5 * (trial({}).cost.recompute_seconds + everything))
    assert 0 < kept < nothing


def test_a_step_takes_time_though_its_pieces_were_timed_longer():
    kept, nothing = trial(EVERYTHING).cost.seconds, trial({}).cost.seconds
    for whole in (kept / 1000, kept / 2, 0.999 * kept):
        short = step_time(measured=whole)
        assert short.seconds(trial(EVERYTHING).cost) == pytest.approx(whole)
        assert short.seconds(trial({}).cost) == pytest.approx(whole * nothing / kept)
        assert short.seconds(trial({"u": KEEP}).cost) > 0
    assert step_time(measured=kept).seconds(trial({}).cost) == pytest.approx(nothing)


def run(name: str, *rounds: float, lossy: bool = False) -> Runs:
    trial = types.SimpleNamespace(cost=types.SimpleNamespace(is_lossy=lossy))
    return Runs(name, trial, rounds)  # pyright: ignore


@pytest.mark.parametrize(
    ("lossy", "exact", "codecs_by_default", "taken"),
    [
        ([0.99] * 4, [1.0] * 4, True, "exact"),
        ([0.97] * 4, [1.0] * 4, True, "lossy"),
        ([0.97, 0.90, 1.04, 0.97], [1.0, 0.93, 1.07, 1.0], True, "exact"),  # within the spread
        ([0.99] * 4, [1.0] * 4, False, "lossy"),
        ([1.01] * 4, [1.0] * 4, True, "exact"),
    ],
)
def test_a_loss_must_be_noticed(lossy, exact, codecs_by_default, taken):
    runs = [run("lossy", *lossy, lossy=True), run("slow", *[2.0] * 4), run("exact", *exact)]
    assert fastest_run(codecs_by_default, runs).name == taken


def test_a_loss_is_taken_where_nothing_else_ran():
    assert fastest_run(True, [run("lossy", 1.0, lossy=True)]).name == "lossy"

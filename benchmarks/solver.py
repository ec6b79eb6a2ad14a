"""The solver: its time on real profiles, its optimum against brute force on random graphs, and
against greedy.

    python -m benchmarks.solver

Profiles: gpt_117m, gpt_345m and gpt_4b7 on h200 and a100-80gb, at rooms from the least bytes to
those of all tags kept. Random graphs of up to 8 tags: the same that the tests draw, every
assignment tried and priced by an oracle that shares no code with the solver. A solve's time has all
of it: building the program, HiGHS, and the exact count afterwards; processor seconds are those of
the process, which other work on the machine does not lengthen as much. On real profiles, seconds
are those that assignments are ranked by: with lossy codecs at their longest.
"""

import collections
import itertools
import random
import statistics
import time

import hypothesis
from hypothesis import strategies as st

from benchmarks.shared.case import Case, case_on
from benchmarks.shared.results import Benchmark, Report, measure
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solve import least_bytes, solve
from tests.shared import profiles
from tests.shared.greedy import greedy

CASES = tuple(itertools.product(("h200", "a100-80gb"), ("gpt_117m", "gpt_345m", "gpt_4b7")))
ROOMS, GRAPHS = 25, 300
SAME = 1e-6  # relative, in priced seconds: ties are broken in favour of fewer bytes
RANDOM = "random graphs"


def on_profile(case: Case) -> dict:
    made = case.profile
    least, most = least_bytes(ActionProblem(made)), evaluate(made, case.keep_tags)
    assert least is not None
    more = most.saved_bytes - least.bytes
    rooms = [round(least.bytes + more * i / (ROOMS - 1)) for i in range(ROOMS)]
    seconds, processor, ratios, slack = [], [], [], []
    counts = collections.Counter(greedy_found_none=0, greedy_better=0, time_rose_with_room=0)
    before = float("inf")
    for room in rooms:
        start, busy = time.perf_counter(), time.process_time()
        best = solve(ActionProblem(made, room=room))
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - busy)
        assert best is not None
        assert best.bytes <= room
        counts["time_rose_with_room"] += best.risk_adjusted_seconds > before * (1 + SAME)
        before = best.risk_adjusted_seconds
        slack.append(best.bytes / room if room else 1.0)
        other = greedy(ActionProblem(made, room=room))
        if other is None:
            counts["greedy_found_none"] += 1
            continue
        theirs = other.risk_adjusted_seconds
        counts["greedy_better"] += before > theirs * (1 + SAME)
        ratios.append(theirs / before if before else 1.0)
    return {
        "tags": sum(len(b.tags) for b in made.blocks),
        "equations": sum(len(b.equations) for b in made.blocks),
        "rooms_bytes": [rooms[0], rooms[-1]],
        "solve_seconds": _spread(seconds),
        "processor_seconds": _spread(processor),
        "greedy_seconds_over_ours": _spread(ratios),
        "median_share_of_room_used": statistics.median(slack),
        **counts,
    }


def on_random_graphs() -> dict:
    counts = collections.Counter(
        graphs=0, with_8_tags=0, assignments_tried=0, solves=0, equal_to_brute_force=0,
        infeasible_in_both=0, greedy_found_none=0, greedy_worse=0, greedy_equal=0, greedy_better=0,
    )  # fmt: skip
    seconds: list[float] = []
    ratios: list[float] = []

    def in_room(made, known: list, room: int) -> None:
        start = time.perf_counter()
        got = solve(ActionProblem(made, room=room))
        seconds.append(time.perf_counter() - start)
        want = min((p.priced for p in known if p.bytes <= room), default=None)
        counts["solves"] += 1
        if got is None or want is None:
            counts["infeasible_in_both"] += got is None and want is None
            return
        price = lambda one: one.seconds + (profiles.PRICE - 1) * one.cost.recompute_seconds
        priced, tie = price(got), 2e-6 * max(1.0, max(p.priced for p in known))
        equal = got.bytes <= room and priced <= want * (1 + SAME) + tie
        counts["equal_to_brute_force"] += equal
        other = greedy(ActionProblem(made, room=room))
        if other is None:
            counts["greedy_found_none"] += 1
            return
        more = price(other) - priced
        counts[f"greedy_{'worse' if more > tie else 'better' if more < -tie else 'equal'}"] += 1
        if got.seconds > 0:
            ratios.append(other.seconds / got.seconds)

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=GRAPHS,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),  # pyright: ignore[reportArgumentType],
    )
    @hypothesis.given(profiles.profiles(), st.integers(0, 2**31))
    def one(made, seed):
        known = profiles.prices(made)
        counts["graphs"] += 1
        counts["with_8_tags"] += sum(len(b.tags) for b in made.blocks) >= 8
        counts["assignments_tried"] += len(known)
        sizes = sorted({p.bytes for p in known})
        rooms = {random.Random(seed).choice(sizes), sizes[0] - 1, sizes[len(sizes) // 2]}
        for room in sorted(room for room in rooms if room >= 0):
            in_room(made, known, room)

    one()
    return {
        **counts,
        "solve_seconds": _spread(seconds),
        "greedy_seconds_over_ours": _spread(ratios),
    }


def _spread(values: list[float]) -> dict:
    if not values:
        return {"n": 0}
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "median": statistics.median(ordered),
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "max": ordered[-1],
        "min": ordered[0],
    }


def run(report: Report, target: str, config: str) -> None:
    if not report.has(key := f"{config} {target}"):
        with case_on(target, config) as case:
            report.add(key, on_profile(case))


def summary(report: Report) -> dict:
    graphs = report.once(RANDOM, on_random_graphs)
    real = [r for k, r in report.results.items() if k != RANDOM]
    of = lambda which, key: [r[which][key] for r in real]
    equal = graphs["equal_to_brute_force"] + graphs["infeasible_in_both"]
    better = sum(r["greedy_better"] for r in real) + graphs["greedy_better"]
    return {
        "median of solve seconds on a real profile, largest": max(of("solve_seconds", "median")),
        "median of processor seconds on a real profile, largest": max(
            of("processor_seconds", "median")
        ),
        "longest solve on a real profile": max(of("solve_seconds", "max")),
        "solves on real profiles": sum(of("solve_seconds", "n")),
        "greedy better than the solver": better,
        "random solves equal to brute force or infeasible in both": [equal, graphs["solves"]],
    }


RESULTS = {"solver": Benchmark(CASES, run, summary)}


if __name__ == "__main__":
    measure("solver", RESULTS)

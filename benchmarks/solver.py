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

import random
import statistics
import time
import warnings

import hypothesis
from hypothesis import strategies as st

from benchmarks.shared.case import Case
from benchmarks.shared.results import Report
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solve import least_bytes, solve
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from tests.shared import profiles
from tests.shared.greedy import greedy

CONFIGS, TARGETS, ROOMS = ("gpt_117m", "gpt_345m", "gpt_4b7"), ("h200", "a100-80gb"), 25
GRAPHS = 300
SAME = 1e-6  # relative, in priced seconds: ties are broken in favour of fewer bytes


def on_profile(case: Case) -> dict:
    made = case.profile
    least, most = least_bytes(Problem(made)), evaluate(made, case.keep_tags)
    assert least is not None
    rooms = [
        round(least.bytes + (most.saved_bytes - least.bytes) * i / (ROOMS - 1))
        for i in range(ROOMS)
    ]
    seconds, processor, ratios, slack = [], [], [], []
    missed = worse = rising = 0
    before = float("inf")
    for room in rooms:
        start, busy = time.perf_counter(), time.process_time()
        best = solve(Problem(made, room=room))
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - busy)
        assert best is not None
        assert best.bytes <= room
        rising += best.cautious_seconds > before * (1 + SAME)
        before = best.cautious_seconds
        slack.append(best.bytes / room if room else 1.0)
        other = greedy(Problem(made, room=room))
        if other is None:
            missed += 1
        else:
            worse += best.cautious_seconds > other.cautious_seconds * (1 + SAME)
            ratios.append(
                other.cautious_seconds / best.cautious_seconds if best.cautious_seconds else 1.0
            )
    return {
        "tags": sum(len(b.tags) for b in made.blocks),
        "equations": sum(len(b.equations) for b in made.blocks),
        "rooms_bytes": [rooms[0], rooms[-1]],
        "solve_seconds": _spread(seconds),
        "processor_seconds": _spread(processor),
        "greedy_found_none": missed,
        "greedy_better": worse,
        "greedy_seconds_over_ours": _spread(ratios),
        "time_rose_with_room": rising,
        "median_share_of_room_used": statistics.median(slack),
    }


def on_random_graphs() -> dict:
    counts = {
        "graphs": 0,
        "with_8_tags": 0,
        "assignments_tried": 0,
        "solves": 0,
        "equal_to_brute_force": 0,
        "infeasible_in_both": 0,
    }
    versus = {"greedy_found_none": 0, "greedy_worse": 0, "greedy_equal": 0, "greedy_better": 0}
    seconds: list[float] = []
    ratios: list[float] = []

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
        for room in sorted(rooms):
            if room < 0:
                continue
            start = time.perf_counter()
            got = solve(Problem(made, room=room))
            seconds.append(time.perf_counter() - start)
            want = min((p.priced for p in known if p.bytes <= room), default=None)
            counts["solves"] += 1
            if got is None or want is None:
                counts["infeasible_in_both"] += got is None and want is None
                continue
            priced = got.seconds + (profiles.PRICE - 1) * got.cost.recompute_seconds
            tie = 2e-6 * max(1.0, max(p.priced for p in known))
            counts["equal_to_brute_force"] += (
                got.bytes <= room and priced <= want * (1 + SAME) + tie
            )
            other = greedy(Problem(made, room=room))
            if other is None:
                versus["greedy_found_none"] += 1
                continue
            theirs = other.seconds + (profiles.PRICE - 1) * other.cost.recompute_seconds
            outcome = (
                "worse" if theirs > priced + tie else "better" if theirs < priced - tie else "equal"
            )
            versus[f"greedy_{outcome}"] += 1
            if got.seconds > 0:
                ratios.append(other.seconds / got.seconds)

    one()
    return (
        counts
        | versus
        | {"solve_seconds": _spread(seconds), "greedy_seconds_over_ours": _spread(ratios)}
    )


def _spread(values: list[float]) -> dict:
    if not values:
        return {"n": 0}
    ordered = sorted(values)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    return {
        "n": len(ordered),
        "median": statistics.median(ordered),
        "p90": at(0.9),
        "max": ordered[-1],
        "min": ordered[0],
    }


def main() -> None:
    warnings.simplefilter("ignore")
    report = Report("solver")
    for target in TARGETS:
        for config in CONFIGS:
            if not report.has(key := f"{config} {target}"):
                with backend_for(Target.parse(target)) as backend:
                    report.add(key, on_profile(Case(config, backend)))
    if not report.has("random graphs"):
        report.add("random graphs", on_random_graphs())
    real = [r for k, r in report.results.items() if k != "random graphs"]
    graphs = report["random graphs"]
    report.summarise(
        {
            "median of solve seconds on a real profile, largest": max(
                r["solve_seconds"]["median"] for r in real
            ),
            "median of processor seconds on a real profile, largest": max(
                r["processor_seconds"]["median"] for r in real
            ),
            "longest solve on a real profile": max(r["solve_seconds"]["max"] for r in real),
            "solves on real profiles": sum(r["solve_seconds"]["n"] for r in real),
            "greedy better than the solver": sum(r["greedy_better"] for r in real)
            + graphs["greedy_better"],
            "random solves equal to brute force or infeasible in both": [
                graphs["equal_to_brute_force"] + graphs["infeasible_in_both"],
                graphs["solves"],
            ],
        }
    )


if __name__ == "__main__":
    main()

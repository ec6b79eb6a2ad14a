"""What the planner knows before a step runs, against traced and compiled programs. No step runs.

    python -m benchmarks.estimates [RESULT ...]

`profile_exact`: predicted saved bytes and recomputed matrix products, under uniform, random and
solved plans of gpt_117m, gpt_345m and gpt_4b7 for h200, a100-80gb and local. The profile's
prediction is compared with what the traced step's backward gets from its forward
(`tests.shared.audit`), with the stacks that the forward's loops pass to the backward's loops (which
knows nothing of blocks), and with the matrix products that the backward repeats. Some plans are
also compared with the products and FLOPs of the optimized HLO, loops times trip counts. `local` has
the times of h200: neither changes a byte.

`walk`: liveness estimates of bytes, against compiled steps. Each of `MODELS` in
`benchmarks/shared/steps.py`, for this CPU and for an H200, under `jaxmem.auto`: the step as it is,
every tag recomputed, and two random assignments (half of the tags recomputed, the others under any
action that is no transfer).
`error` is the estimated bytes of the whole step on the device against the compiled bytes. The
estimate was written looking at gpt_nano, gpt_117m and bert_base, and at a part of these models on
the CPU; none of its numbers is fitted to any of them. `loop` says whether the program loops over
its layers: where a Python loop repeats them, XLA fuses and orders across layers, and less is known.

`time_choices`: does the cost model know the time of a choice on a GPU? The step with every tag kept
is compared with the step with nothing kept, with everything kept, and with each tag alone left out,
for an H200. `xla` and `model` are by how much longer the step takes, by XLA's estimate of the whole
compiled step and by the cost model, as shares of the step with every tag kept; errors are their
differences. XLA prices no host copies.

`product_times`: the price of a matrix product in a Triton fusion, against XLA's table. XLA's
estimates of products in Triton fusions mean nothing before autotuning, so that
`jaxmem._target.hlo.products` prices them by rates. XLA has a table of products that its authors
measured on an H100, which it reads for library calls. Here bfloat16 products of transformers'
shapes are compiled for an H200 as both. `ratio` is the formula's time over the table's.

`solver`: the solver's optimum against brute force, and its time. Profiles: gpt_117m, gpt_345m and
gpt_4b7 on h200 and a100-80gb, at rooms from the least bytes to those of all tags kept. Random
graphs of up to 8 tags: the same that the tests draw, every assignment tried and priced by an oracle
that shares no code with the solver. A greedy planner must never be better. On real profiles,
seconds are those that assignments are ranked by: with lossy codecs at their longest.
"""

import ast
import collections
import itertools
import random
import statistics

import hypothesis
import jax
import jax.numpy as jnp
from hypothesis import strategies as st

from benchmarks.shared.assignments import drawn, keep_tags, plans, show
from benchmarks.shared.case import SCANNED, AnyTimes, Case, Step, case_on, on
from benchmarks.shared.devices import compiled
from benchmarks.shared.results import Benchmark, Report, known, measure, of_errors, timed
from benchmarks.shared.searches import from_to
from benchmarks.shared.steps import MODELS, SIZES, of_model
from jaxmem._core.actions import ALL, KEEP, LOSSLESS, RECOMPUTE, UNTAGGED, Actions
from jaxmem._core.assignment import Assignment
from jaxmem._core.profile import Profile
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._planner.search.estimates import Estimates
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solve import least_bytes, solve
from tests.shared import profiles
from tests.shared.audit import audit, loop_bytes
from tests.shared.greedy import greedy

# -- profile_exact

GPTS, TARGETS = ("gpt_117m", "gpt_345m", "gpt_4b7"), ("h200", "a100-80gb", "local")
CASES = tuple((c, t) for t in TARGETS for c in GPTS)
COMPILED = {
    ("gpt_117m", "h200"): ("recompute", "compress", "solved 0.2"),
    ("gpt_345m", "h200"): ("recompute", "solved 0.2", "random 1"),
    ("gpt_117m", "a100-80gb"): ("solved 0.08",),
    ("gpt_117m", "local"): ("random 0",),
}


def recomputations(case: Case, cost) -> tuple[int, float]:
    """Matrix products that a plan is predicted to repeat, and their FLOPs."""
    blocks = list(zip(case.profile.blocks, cost.blocks))
    return sum(b.runs * c.matmuls for b, c in blocks), sum(b.runs * c.flops for b, c in blocks)


def compare(case: Case, actions: Actions) -> dict:
    """[predicted, in the trace]."""
    keep, traced = audit(case.trace(None)), case.trace(actions)
    found, said = audit(traced), evaluate(case.profile, actions)
    matmuls, flops = recomputations(case, said)
    row = {
        "saved_bytes": [said.saved_bytes, found.saved_bytes],
        "host_bytes": [said.host_bytes, found.host_bytes],
        "bytes_between_loops": [said.saved_bytes + said.host_bytes, loop_bytes(traced.jaxpr.jaxpr)],
        "recomputed_matmuls": [matmuls, found.matmuls - keep.matmuls],
        "recomputed_flops": [flops, found.matmul_flops - keep.matmul_flops],
    }
    return row | {"equal": all(a == b for a, b in row.values()), "actions": show(actions)}


def optimized(case: Case, actions: Actions) -> dict:
    """[predicted, in the HLO]."""
    base, under = (step.compiled.matmuls for step in case.compile_buffers(None, actions))
    matmuls, _ = recomputations(case, evaluate(case.profile, actions))
    return {"recomputed_matmuls": [matmuls, under - base]}


def of_profile(report: Report, config: str, target: str) -> None:
    database = AnyTimes() if target == "local" else None
    with case_on(target, config, database=database) as case:
        made = plans(case.profile, case.config.model.width)
        report.once_each(f"{config} {target} ", made, compare, case)
        # Compiles come last, since they take the longest.
        if report.has(*(f"{c} {t} keep" for c, t in CASES)):
            chosen = {name: made[name] for name in COMPILED.get((config, target), ())}
            report.once_each(f"HLO {config} {target} ", chosen, optimized, case)


def summary_of_profile(report: Report) -> dict:
    hlo = report.under("HLO ")
    traced = [r for k, r in report.results.items() if not k.startswith("HLO")]
    pairs = [r["recomputed_matmuls"] for r in hlo.values()]
    return {
        "plans": len(traced),
        "equal in bytes and products, as traced": sum(r["equal"] for r in traced),
        "plans compiled": len(hlo),
        "equal in recomputed products, as compiled": sum(a == b for a, b in pairs),
    }


# -- walk

WALKED = ("local", "h200")
LOOPS = ("scan", "microbatches", "names twice", "mixture", "encoder", "recurrent")
RANDOM = 2


def assignments(made: Profile) -> dict[str, Actions]:
    """By name; the step as it is first."""
    rng = random.Random(0)
    half = lambda choices: rng.choice(choices) if rng.random() < 0.5 else RECOMPUTE
    found = {"as it is": made.everything_kept, "recomputed": made.everything_recomputed}
    return found | {f"random {i}": drawn(made, half) for i in range(RANDOM)}


def of_walk(report: Report, name: str, target: str) -> None:
    build, args = of_model(MODELS[name], SIZES[target])
    with on(target, AnyTimes()) as backend:
        here = [action for action in ALL if not action.offloads]
        step = Step(build, args, backend, here)
        walks = Estimates(step.compiler, step.profile)
        for which, actions in assignments(step.profile).items():
            if report.has(key := f"{name}, {target}, {which}"):
                continue
            (found,) = step.compiler.try_compile_buffers(actions)
            if isinstance(found, CompiledStep):
                told = walks.estimate_step(actions)[0] + found.compiled.argument_bytes
                total = found.compiled.total_bytes
                row = {"walked": told, "compiled": total, "error": told / total - 1}
                report.add(key, row | {"loop": any(word in name for word in LOOPS)})


def summary_of_walk(report: Report) -> dict:
    rows = report.results.items()
    chosen = lambda target, loop: [
        r["error"] for k, r in rows if f", {target}, " in k and r["loop"] == loop
    ]
    ways = {True: "a loop over layers", False: "a Python loop"}
    cases = itertools.product(WALKED, ways)
    return {f"{target}, {ways[loop]}": of_errors(chosen(target, loop)) for target, loop in cases}


# -- time_choices

CONFIGS = ("gpt_117m", "gpt_345m", "bert_base")
EVERY = "every tag kept"


def of_choices(report: Report, name: str) -> None:
    with case_on("h200", name, *SCANNED, allowed=LOSSLESS) as case:
        made = case.profile
        (label,) = {b.name for b in made.blocks}
        tags = list(dict.fromkeys(t.name for b in made.blocks for t in b.tags))
        chosen = {
            EVERY: dict.fromkeys(tags, KEEP),
            "nothing kept": {},
            "everything": {UNTAGGED: KEEP},
        }
        chosen |= {f"not {t}": {u: KEEP for u in tags if u != t} for t in tags}
        wanted = {k: {label: v} for k, v in chosen.items() if not report.has(f"{name}, {k}")}
        # All are submitted before the first result is awaited.
        futures = {k: case.compile_fully(Assignment(v)) for k, v in wanted.items()}
        for key, actions in wanted.items():
            seconds = futures[key].result().xla_seconds
            model = evaluate(made, actions).seconds
            report.add(f"{name}, {key}", {"xla_seconds": seconds, "model_seconds": model})


def summary_of_choices(report: Report, name: str) -> dict:
    rows = report.under(f"{name}, ")
    base = rows.pop(EVERY)
    longer = lambda row, key: (row[key] - base[key]) / base["xla_seconds"]
    differ = lambda row: abs(longer(row, "model_seconds") - longer(row, "xla_seconds"))
    errors = [*map(differ, rows.values())]
    return {"median error": statistics.median(errors), "largest error": max(errors)}


# -- product_times

LIBRARY = {"xla_gpu_enable_triton_gemm": False}
OF_LAYERS = itertools.product(
    (1024, 4096, 8192, 32768),
    (
        (768, 768), (3072, 768), (768, 3072), (2304, 768), (1024, 4096), (4096, 1024),
        (4096, 4096), (16384, 4096),
    ),
)  # fmt: skip
OF_ATTENTION = itertools.product(
    (24, 96, 512), ((1024, 1024, 64), (1024, 64, 1024), (2048, 2048, 128))
)
PRODUCTS = [  # (m, n, k), with a batch before it for attention's
    *((first, *rest) for first, rest in (*OF_LAYERS, *OF_ATTENTION)),
    *((768, 768, 8192), (3072, 768, 8192), (4096, 4096, 8192)),  # of gradients
    *((1024, 50257, 768), (8192, 50257, 768)),  # a vocabulary that no tile divides
]


def ratio(batch_m_n_k: str) -> dict[str, float]:
    """Seconds of a product by the formula and by the table, which XLA reads for library calls."""
    *batch, m, n, k = ast.literal_eval(batch_m_n_k)
    shapes = (*batch, m, k), (*batch, k, n)
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    traced = jax.jit(jnp.matmul).trace(*avals)
    seconds = lambda options: known(compiled("h200", traced, 90, options).xla_seconds)
    ours, table = seconds(None), seconds(LIBRARY)
    return {"formula": ours, "table": table, "ratio": ours / table}


def summary_of_products(report: Report) -> dict:
    """How far the formula is from the table, for shapes that tiles divide and for others."""
    of = lambda odd: [r["ratio"] - 1 for k, r in report.results.items() if ("50257" in k) == odd]
    return {"shapes that tiles divide": of_errors(of(False)), "other shapes": of_errors(of(True))}


# -- solver

PROFILES = [(config, target) for target in ("h200", "a100-80gb") for config in GPTS]
ROOMS, GRAPHS = 25, 300
SAME = 1e-6  # relative, in priced seconds: ties are broken in favour of fewer bytes
RANDOM_GRAPHS = "random graphs"


def on_profile(config: str, target: str) -> dict:
    seconds, greedy_better = [], 0
    with case_on(target, config) as case:
        made = case.profile
        least, most = least_bytes(ActionProblem(made)), evaluate(made, keep_tags(made))
        for room in from_to(known(least).bytes, most.saved_bytes, ROOMS):
            solution, taken = timed(solve, ActionProblem(made, room=room))
            best = known(solution)
            seconds.append(taken)
            assert best.bytes <= room
            if (other := greedy(ActionProblem(made, room=room))) is not None:
                ours = best.risk_adjusted_seconds
                greedy_better += ours > other.risk_adjusted_seconds * (1 + SAME)
    spread = {"n": len(seconds), "median": statistics.median(seconds), "max": max(seconds)}
    return {"solve_seconds": spread, "greedy_better": greedy_better}


def in_room(made: Profile, prices: list, room: int) -> dict[str, bool]:
    """Compares the solver's and the greedy planner's solutions within `room` bytes with the best of
    `prices`, the prices of all plans of the profile.
    """
    got, other = (solver(ActionProblem(made, room=room)) for solver in (solve, greedy))
    want = min((p.priced for p in prices if p.bytes <= room), default=None)
    if got is None or want is None:
        return {"solves": True, "infeasible_in_both": got is None and want is None}
    price = lambda one: one.seconds + (profiles.PRICE - 1) * one.cost.recompute_seconds
    priced, tie = price(got), 2e-6 * max(1.0, max(p.priced for p in prices))
    return {
        "solves": True,
        "equal_to_brute_force": got.bytes <= room and priced <= want * (1 + SAME) + tie,
        "greedy_better": other is not None and price(other) < priced - tie,
    }


def on_random_graphs() -> dict:
    counts = collections.Counter(
        solves=0, equal_to_brute_force=0, infeasible_in_both=0, greedy_better=0
    )

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
        prices = profiles.prices(made)
        sizes = sorted({p.bytes for p in prices})
        rooms = {random.Random(seed).choice(sizes), sizes[0] - 1, sizes[len(sizes) // 2]}
        for room in sorted(room for room in rooms if room >= 0):
            counts.update(in_room(made, prices, room))

    one()
    return dict(counts)


def summary_of_solver(report: Report) -> dict:
    graphs = report.once(RANDOM_GRAPHS, on_random_graphs)
    real = [r for k, r in report.results.items() if k != RANDOM_GRAPHS]
    equal = graphs["equal_to_brute_force"] + graphs["infeasible_in_both"]
    better = sum(r["greedy_better"] for r in real) + graphs["greedy_better"]
    return {
        "longest solve on a real profile": max(r["solve_seconds"]["max"] for r in real),
        "solves on real profiles": sum(r["solve_seconds"]["n"] for r in real),
        "greedy better than the solver": better,
        "random solves equal to brute force or infeasible in both": [equal, graphs["solves"]],
    }


RESULTS = {
    "profile_exact": Benchmark([*CASES, *COMPILED], of_profile, summary_of_profile),
    "walk": Benchmark(itertools.product(MODELS, WALKED), of_walk, summary_of_walk),
    "time_choices": Benchmark(CONFIGS, of_choices, of_case=summary_of_choices),
    "solver": Benchmark(PROFILES, row=on_profile, summary=summary_of_solver, joint=" "),
    "product_times": Benchmark(map(str, PRODUCTS), row=ratio, summary=summary_of_products),
}

if __name__ == "__main__":
    measure("estimates", RESULTS)

"""Plans against the policies that a JAX user would write by hand, at the policies' bytes; and the
layer stack against a scan of checkpoints, by plan.

    python -m benchmarks.policies [RESULT ...]

`benchmarks/shared/assignments.py` lists the policies.

`baselines_cpu`: gpt_nano on this CPU, by the clock. Each policy's step is compiled, and its bytes
are the budget of a plan. If the plan compresses, a lossless plan is made too. A round runs every
policy and its plans, in an order of the round's own. A ratio is plan / policy within a round (below
1: the plan is faster): median and quartiles over rounds.

`measured`: does `measure=` return a step that no policy beats at the same budget? Five models are
planned on this CPU with `jaxmem.plan(..., measure=8)`, with room for everything and for 0.6 and 0.4
of its bytes, with all actions and with lossless actions. The plan's step and the steps of the
policies that fit (everything kept, nothing kept, products kept, every tag kept) are then run in
turns, in rounds that chose nothing. `ratios` are the fastest policy's time, by its median, over the
plan's, round by round: above 1 the plan is faster.

`baselines_h200`: steps compiled for an H200 without hardware. A policy's bytes are of XLA's buffer
assignment. Its time is the planner's cost model (seconds in addition to an ideal step that neither
writes nor repeats anything), and XLA's own estimate of the step. A plan is made at each policy's
bytes, and one 8 % below the least of them all. XLA's estimate leaves out host copies, so that it
says nothing of offload. Bytes are of a compile without estimates, since requesting them changes the
matrix kernels.

`tpu_baselines`: the same for TPUs without hardware. A policy is compiled until its buffers are
assigned (completely, if a plan does not win). Its time is a roofline of what the compiler fuses,
with the planner's price of host copies that the layers' work does not hide. A plan wins, or loses,
if the times differ by more than 1 % of the policy's.

`stack_bytes`: `jaxmem.stack` against `lax.scan` with `jax.checkpoint`: compiled bytes of gpt_117m's
and gpt_345m's whole step, and its host bytes, for h200 and for this machine's CPU: every tag under
one action, everything kept, a solved plan, and (in the stack alone) the solved plan for the first
half of the layers with every tag kept in the other half. No step runs.

`stack_time`: step time of gpt_nano on this CPU. Both loops of one plan run within a second or two
of each other, in every round in another order. The ratio is the stack's time over the scan's,
paired by round: median and quartiles, by the clock and by all cores' work.
"""

import itertools
import statistics

import jax

import jaxmem
from benchmarks.shared import assignments
from benchmarks.shared.assignments import Baseline, show
from benchmarks.shared.case import AnyTimes, Case, Step, case_on, nano, on, random_bits_for
from benchmarks.shared.results import Benchmark, Report, known, measure, say
from benchmarks.shared.steps import compile_planned, local_step
from benchmarks.shared.timing import cache_compiles, clock_and_cores, interleaved, over
from experiments.gpu_check.measure import quartiles
from experiments.models.loops import scanned
from experiments.running.planning import compile_candidate
from experiments.running.policies import Candidate
from experiments.steps.step import step_over
from jaxmem._core.actions import ALL, LOSSLESS, Action, Actions
from jaxmem._core.groups import group_label
from jaxmem._planner.search.candidates import is_among
from jaxmem._planner.search.compile import CompiledStep, StepCompiler
from jaxmem._planner.search.measure import hand_policies
from jaxmem._planner.search.measure import quartiles as three_quartiles
from jaxmem._planner.solve.cost import evaluate
from jaxmem.plans import compiled_bytes

# -- baselines_cpu

ROUNDS = 25
LEFT_OUT = ("keep_everything",)  # a plan at its bytes is the same program


def plans_at(case: Case, budget: int) -> dict[str, tuple[jaxmem.Plan | None, dict]]:
    """The plan for `budget` bytes, and a lossless one if it compresses, each with its row."""
    found = {"plan": case.attempt(budget, actions=ALL)}
    plan = found["plan"][0]
    if plan is None or not assignments.is_lossless(plan.actions):
        found["lossless_plan"] = case.attempt(budget, actions=LOSSLESS)
    return found


def by_the_clock(report: Report) -> None:
    cache_compiles()
    case = Case(nano(), on("local"), codecs=assignments.WITH_NAIVE)
    groups, rows = {}, {}
    for baseline in assignments.baselines(case.profile):
        if (name := baseline.name) in LEFT_OUT:
            continue
        step = compile_candidate(case.config, Candidate(baseline.policy))
        nbytes = compiled_bytes(step)
        say(f"{name}: {nbytes} bytes")
        plans = plans_at(case, nbytes)
        steps = {f"{name}/{way}": plan.step for way, (plan, _) in plans.items() if plan}
        groups[name] = {f"{name}/baseline": step} | steps
        told = {way: row for way, (_, row) in plans.items()}
        rows[name] = {"baseline": name, "bytes": nbytes, "plans": told}
    clock, _ = interleaved(case.config, [*groups.values()], ROUNDS)
    for name, row in rows.items():
        base, *planned = groups[name]
        ratios = {key.removeprefix(f"{name}/"): over(clock[key], clock[base]) for key in planned}
        report.add(name, row | {"seconds": quartiles(clock[base]), "ratios": ratios})


# -- measured

SHARES = {"everything": 10, "0.6": 0.6, "0.4": 0.4}  # of the bytes of everything kept
CHOOSING, COMPARING = 8.0, 10.0  # seconds
WAYS = {"all actions": None, "lossless": LOSSLESS}
NAMES = ("gpt_nano", "gemma, a scan", "encoder and decoder", "Linen, nn.scan", "Equinox, a scan")


def policies(step: Step) -> dict:
    """The hand-written policies, compiled, by name."""
    made = step.profile
    wanted = {"everything kept": made.everything_kept} | hand_policies(made)
    return dict(zip(wanted, step.compiler.compile_buffers(*wanted.values()), strict=True))


def compared(step: Step, hand: dict, budget: int, way) -> dict:
    plan = step.plan(budget, actions=way, measure=CHOOSING)
    fits = {n: s for n, s in hand.items() if s.compiled.total_bytes <= budget}
    (own,) = step.compiler.compile_buffers(plan.actions)
    named = {"plan": own} | fits
    rounds = dict(zip(named, step.compiler.run(*named.values(), seconds=COMPARING), strict=True))
    best = min(fits, key=lambda name: statistics.median(rounds[name]), default=None)
    row = {
        "budget": budget,
        "chosen": next(one.name for one in plan.measured if one.chosen),
        "best policy": best,
        "medians": {name: statistics.median(r) for name, r in rounds.items()},
    }
    if best is not None:
        row["is the policy"] = is_among(plan.actions, [fits[best]])
        apart = [b / p for b, p in zip(rounds[best], rounds["plan"], strict=True)]
        row["ratios"] = dict(zip(("lower", "median", "upper"), three_quartiles(apart), strict=True))
    return row


def chosen_by_the_clock(report: Report, name: str) -> None:
    say(name)
    keys = {(s, w): f"{name}, {s}, {w}" for s in SHARES for w in WAYS}
    if report.has(*keys.values()):
        return
    with on("local") as backend:
        step = Step(*local_step(name), backend, allowed=LOSSLESS)
        hand = policies(step)
        whole = hand["everything kept"].compiled.total_bytes
        for (share, way), key in keys.items():
            report.once(key, compared, step, hand, int(SHARES[share] * whole), WAYS[way])
    jax.clear_caches()


def of_way(report: Report, way: str) -> dict:
    rows = {k: r for k, r in report.results.items() if k.endswith(way) and "ratios" in r}
    medians = [r["ratios"]["median"] for r in rows.values()]
    kept = {k: r["medians"] for k, r in rows.items() if "everything kept" in r["medians"]}
    others = {k: r["ratios"] for k, r in rows.items() if not r["is the policy"]}
    slower = [k for k, ratios in others.items() if ratios["upper"] < 1]
    return {
        "points": len(rows),
        "geometric mean": statistics.geometric_mean(medians),
        "least": min(medians),
        # If the plan is the policy itself, their ratio is noise.
        "the plan is the policy": sum(r["is the policy"] for r in rows.values()),
        "slower beyond the quartiles": slower,
        "to everything kept": {k: m["everything kept"] / m["plan"] for k, m in kept.items()},
    }


# -- baselines_h200 and tpu_baselines

CONFIGS, GPU = ("gpt_117m", "gpt_345m"), "h200"
BELOW = 0.92  # of the least bytes of the policies
DRAW = 0.01  # of a TPU's step


def priced(case: Case, step: CompiledStep) -> dict:
    """The bytes and the estimated times of a policy's or a plan's step."""
    seconds, cost = step.compiled.xla_seconds, evaluate(case.profile, step.actions)
    row = {"bytes": step.total, "host_bytes": step.host_bytes, "actions": show(step.actions)}
    if case.target.platform == "tpu":
        exposed = cost.host_seconds
        roofline = known(seconds) + exposed
        return row | {"roofline_seconds": roofline, "exposed_copies_seconds": exposed}
    waiting = {"host_seconds": step.compiled.host_seconds}
    return row | {"model_extra_seconds": cost.seconds, "xla_seconds": seconds} | waiting


def of_baseline(case: Case, baseline: Baseline, whole: bool = False) -> dict:
    # Where no actions are exactly the policy, the step is compiled under the policy itself.
    own = lambda _: step_over(case.config, scanned(baseline.policy))
    compiler = StepCompiler(case.build if baseline.exact else own, case.args, case.backend)
    (step,) = compiler.compile_buffers(baseline.actions)
    step = compiler.compile_fully(step) if whole else step
    model = {"model_is": "exact" if baseline.exact else "the nearest keep-set"}
    return priced(case, step) | model


def of_plan(case: Case, at_bytes: int) -> dict:
    """A plan of no more than `at_bytes` as compiled."""
    plan, row = case.attempt(case.budget_for(at_bytes))
    row["at_bytes"] = at_bytes
    if plan is not None:
        row |= priced(case, *case.compile_buffers(plan.actions)) | {"bytes": plan.compiled_bytes}
    return row


def by_estimates(report: Report, key: str) -> None:
    """`key`: a config, and the TPU."""
    config, _, tpu = key.partition(" ")
    random_bits_for(tpu or GPU)
    with case_on(tpu or GPU, config) as case:
        for baseline in assignments.baselines(case.profile):
            name, planned = f"{key} baseline {baseline.name}", f"{key} plan {baseline.name}"
            at = report.once(name, of_baseline, case, baseline)["bytes"]
            if report.has(planned) or at > case.target.usable_bytes:
                continue
            plan = of_plan(case, at)
            if tpu and outcome(plan, report[name]) != "win":
                # Compiled whole, as a plan is, it may take a little more than its buffers.
                report.add(name, of_baseline(case, baseline, whole=True))
                plan = of_plan(case, report[name]["bytes"])
            report.add(planned, plan)
        if not tpu:
            least = min(r["bytes"] for r in report.under(f"{key} baseline ").values())
            report.once(f"{key} plan 8 % below the least", of_plan, case, int(BELOW * least))


def outcome(plan: dict, base: dict) -> str:
    if not plan["found"]:
        return "none found"
    less = 1 - plan["roofline_seconds"] / base["roofline_seconds"]
    return "win" if less > DRAW else "loss" if less < -DRAW else "draw"


def of_gpu(report: Report, config: str) -> dict:
    bases, plans = (report.under(f"{config} {what} ") for what in ("baseline", "plan"))
    seconds = lambda name, plan: [bases.get(name, {}).get("xla_seconds"), plan["xla_seconds"]]
    found = {name: plan for name, plan in plans.items() if plan["found"]}
    return {"rows": [{"against": n, "xla_seconds": seconds(n, p)} for n, p in found.items()]}


def of_tpu(report: Report, key: str) -> dict:
    rows = {}
    for against, plan in report.under(f"{key} plan ").items():
        base = report[f"{key} baseline {against}"]
        ratio = plan["roofline_seconds"] / base["roofline_seconds"] if plan["found"] else None
        rows[against] = {"outcome": outcome(plan, base), "time against the baseline's": ratio}
    ended = [row["outcome"] for row in rows.values()]
    counts = {name: ended.count(name) for name in ("win", "draw", "loss", "none found")}
    return {"counts": counts, "rows": rows}


# -- stack_bytes

LOOPS = "scan", "stack"
CHOSEN = ("keep everything", "keep", "recompute", "compress", "offload", "solved 0.2")


def halves(first: Actions, last: Actions, layers: int) -> Actions:
    """Two groups of the one block's layers."""
    (a,), (b,) = first.values(), last.values()
    half = layers // 2
    return {group_label("block", 0, half): a, group_label("block", half, layers): b}


def sizes(case: Case, actions: Actions | None) -> dict:
    (step,) = case.compile_buffers(actions)
    return {"bytes": step.total, "host_bytes": step.host_bytes}


def both_loops(scan: Case, stack: Case, actions: Actions | None) -> dict:
    found = {"scan": sizes(scan, actions), "stack": sizes(stack, actions)}
    return found | {"ratio": found["stack"]["bytes"] / found["scan"]["bytes"]}


def of_stack(report: Report, config: str, target: str) -> None:
    with on(target, AnyTimes()) as backend:
        scan, stack = (Case(config, backend, [f"model.loop={loop}"]) for loop in LOOPS)
        found: dict = assignments.plans(scan.profile, scan.config.model.width)
        two = halves(found["solved 0.2"], found["keep"], stack.config.model.layers)
        found["keep everything"] = None
        chosen = {name: found[name] for name in CHOSEN if name in found}
        report.once_each(f"{config} {target} ", chosen, both_loops, scan, stack)
        report.once(f"{config} {target} two groups", lambda: {"stack": sizes(stack, two)})


def of_bytes(report: Report) -> dict:
    ratios = {k: r["ratio"] for k, r in report.results.items() if "ratio" in r}
    return {"largest ratio": max(ratios.values()), "ratios": ratios}


# -- stack_time


def time_stack(report: Report) -> None:
    cache_compiles()
    configs = {loop: nano(f"model.loop={loop}") for loop in LOOPS}
    profile = Case(configs["scan"], on("local")).profile
    chosen: dict[str, Actions | None] = {
        "everything kept": None,
        "keep": assignments.keep_tags(profile),
        "recompute": profile.everything_recomputed,
        "compress": assignments.under(profile, Action.COMPRESS),
        "solved": assignments.solved(profile, 0.25),
    }
    groups = [
        {f"{name} {loop}": compile_planned(config, actions) for loop, config in configs.items()}
        for name, actions in chosen.items()
    ]
    seconds = interleaved(configs["scan"], groups, ROUNDS)
    for name in chosen:
        report.add(name, clock_and_cores(seconds, f"{name} stack", f"{name} scan"))


def of_time(report: Report) -> dict:
    worst = max(r["cores"]["median"] for r in report.results.values())
    return {"largest median ratio of cores' work, stack to scan": worst}


RESULTS = {
    "baselines_cpu": Benchmark(run=by_the_clock),
    "measured": Benchmark(
        NAMES, chosen_by_the_clock, lambda report: {way: of_way(report, way) for way in WAYS}
    ),
    "baselines_h200": Benchmark(CONFIGS, by_estimates, of_case=of_gpu),
    "tpu_baselines": Benchmark(
        [f"{config} {tpu}" for config in CONFIGS for tpu in ("v5e", "v6e")],
        by_estimates,
        of_case=of_tpu,
    ),
    "stack_bytes": Benchmark(itertools.product(CONFIGS, (GPU, "local")), of_stack, of_bytes),
    "stack_time": Benchmark(run=time_stack, summary=of_time),
}

if __name__ == "__main__":
    measure("policies", RESULTS)

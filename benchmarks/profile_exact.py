"""Predicted saved bytes and recomputed matrix products against the traced program's and the
compiled one's, by plan.

    python -m benchmarks.profile_exact

Plans: uniform, random and solved ones of gpt_117m, gpt_345m and gpt_4b7 for h200, a100-80gb and
local. Of each, the profile's prediction is compared with what the traced step's backward gets from
its forward (`tests.shared.audit`), with the stacks that the loops of the forward hand to
the loops of the backward (which knows nothing of blocks), and with the matrix products that the
backward repeats. Of some, with the optimized HLO's products and FLOPs, loops times trip counts. No
step is run, and `local` has the times of h200: neither changes a byte.
"""

from benchmarks.shared.assignments import plans, show
from benchmarks.shared.case import AnyTimes, Case, case_on
from benchmarks.shared.results import Report
from jaxmem._core.actions import Actions
from jaxmem._planner.solve.cost import evaluate
from jaxmem._trace.jaxpr import as_scan, matmul_flops, nbytes, subjaxprs
from tests.shared.audit import audit

CONFIGS, TARGETS = ("gpt_117m", "gpt_345m", "gpt_4b7"), ("h200", "a100-80gb", "local")
CASES = tuple((c, t) for t in TARGETS for c in CONFIGS)
COMPILED = {
    ("gpt_117m", "h200"): ("recompute", "compress", "solved 0.2"),
    ("gpt_345m", "h200"): ("recompute", "solved 0.2", "random 1"),
    ("gpt_117m", "a100-80gb"): ("solved 0.08",),
    ("gpt_117m", "local"): ("random 0",),
}


def stacks(jaxpr) -> int:
    """Bytes that loops stack up and later reversed loops read: an audit that knows nothing of
    blocks and policies.
    """
    made = {}  # by id, since a literal among operands has no hash
    for eqn in jaxpr.eqns:
        if (scan := as_scan(eqn)) is not None and not eqn.params["reverse"]:
            made |= {id(v): nbytes(v.aval) for v in eqn.outvars[scan.carry :]}
    read = set()
    for eqn in jaxpr.eqns:
        if (scan := as_scan(eqn)) is not None and eqn.params["reverse"]:
            used = _used(scan.jaxpr)
            operands = zip(eqn.invars, scan.jaxpr.invars)
            read |= {id(o) for o, i in operands if id(o) in made and id(i) in used}
    return sum(made[v] for v in read)


def _used(jaxpr) -> set[int]:
    """What a jaxpr reads, by id."""
    return {id(v) for e in jaxpr.eqns for v in _read(e)} | {id(v) for v in jaxpr.outvars}


def _read(eqn):
    """Operands of an equation that it uses: a checkpoint's may pass some in that nothing reads."""
    inner = next(subjaxprs(eqn), None)
    if inner is None or len(inner.invars) != len(eqn.invars):
        return eqn.invars
    used = _used(inner)
    return [o for o, i in zip(eqn.invars, inner.invars) if id(i) in used]


def recomputed(case: Case, cost) -> tuple[int, float]:
    """Matrix products that a plan is predicted to repeat, and their FLOPs."""
    blocks = list(zip(case.profile.blocks, cost.blocks))
    return sum(b.runs * c.matmuls for b, c in blocks), sum(b.runs * c.flops for b, c in blocks)


def compare(case: Case, actions: Actions) -> dict:
    """[predicted, in the trace]."""
    keep, traced = audit(case.trace(None)), case.trace(actions)
    found, said = audit(traced), evaluate(case.profile, actions)
    matmuls, flops = recomputed(case, said)
    row = {
        "saved_bytes": [said.saved_bytes, found.saved_bytes],
        "host_bytes": [said.host_bytes, found.host_bytes],
        "bytes_between_loops": [said.saved_bytes + said.host_bytes, stacks(traced.jaxpr.jaxpr)],
        "recomputed_matmuls": [matmuls, found.matmuls - keep.matmuls],
        "recomputed_flops": [flops, found.matmul_flops - keep.matmul_flops],
    }
    return row | {"equal": all(a == b for a, b in row.values()), "actions": show(actions)}


def compiled(case: Case, actions: Actions) -> dict:
    """[predicted, in the HLO]; what is predicted for the step's FLOPs is its trace with all kept,
    and what is recomputed.
    """
    base, under = (v.compiled for v in case.compile(None, actions))
    matmuls, flops = recomputed(case, evaluate(case.profile, actions))
    flops += sum(matmul_flops(e)[0] for e in case.trace(None).jaxpr.jaxpr.eqns)
    return {
        "recomputed_matmuls": [matmuls, under.matmuls - base.matmuls],
        "step_flops": [flops, under.matmul_flops],
        "flops_ratio": under.matmul_flops / flops,
        "total_bytes": under.total_bytes,
    }


def run(report: Report, config: str, target: str) -> None:
    database = AnyTimes() if target == "local" else None
    with case_on(target, config, database=database) as case:
        made = plans(case.profile, case.config.model.width)
        for name, actions in made.items():
            report.once(f"{config} {target} {name}", compare, case, actions)
        # Compiles come last, since they take the longest.
        if all(report.has(f"{c} {t} keep") for c, t in CASES):
            for name in COMPILED.get((config, target), ()):
                report.once(f"HLO {config} {target} {name}", compiled, case, made[name])


def summary(report: Report) -> dict:
    hlo = report.under("HLO ")
    traced = [r for k, r in report.results.items() if not k.startswith("HLO")]
    pairs = [r["recomputed_matmuls"] for r in hlo.values()]
    return {
        "plans": len(traced),
        "equal in bytes and products, as traced": sum(r["equal"] for r in traced),
        "plans compiled": len(hlo),
        "equal in recomputed products, as compiled": sum(a == b for a, b in pairs),
        "largest deviation of HLO FLOPs": max(abs(r["flops_ratio"] - 1) for r in hlo.values()),
    }


def main() -> None:
    Report("profile_exact").for_each([*CASES, *COMPILED], run, summary)


if __name__ == "__main__":
    main()

"""The config's plan or named policy, and the step that runs under it."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import pydantic

import jaxmem
import jaxmem.cli
from experiments.config.text import Config
from experiments.errors import InputError
from experiments.models.loops import scanned
from experiments.running.policies import Candidate, candidates
from experiments.steps.step import abstract, make_step, step_over

UNPLANNED, KEPT = "none", "keep_everything"


@dataclasses.dataclass(frozen=True)
class Ready:
    """A compiled step on this device. `plan` None: under a named `policy`. `compiled_bytes` are of
    this `step`.

    `found` is what a search over named policies decided, after `compiles` of them.
    """

    step: Callable[..., Any]
    plan: jaxmem.Plan | None
    compiled_bytes: int
    policy: str = "plan"
    found: dict[str, Any] = dataclasses.field(default_factory=dict)
    compiles: int = 1

    @property
    def baseline_bytes(self) -> int | None:
        """Bytes with everything kept, where they are known."""
        if self.plan is not None:
            return self.plan.baseline_bytes
        return self.compiled_bytes if self.policy == KEPT else None


def new_plan(config: Config, budget: int | str | None, target: str) -> jaxmem.Plan:
    """Plans the config's step from shapes alone: no array of the model's size is made."""
    wanted = config.plan.actions
    chosen: Any = jaxmem.plans.LOSSLESS if wanted == "lossless" else wanted
    with jaxmem.plans.progress():
        return jaxmem.plan(
            functools.partial(make_step, config),
            *abstract(config),
            budget=budget,
            host_budget=config.plan.host_budget,
            target=target,
            **({} if wanted == "all" else {"actions": chosen}),
        )


def prepare(config: Config) -> Ready:
    """The step to train with, as the config says: under a named policy, a plan's file, a new plan,
    or none.
    """
    if config.remat.policy != "plan":
        return named(config)
    build, shapes = functools.partial(make_step, config), abstract(config)
    if config.plan.path is not None:
        plan = jaxmem.Plan.load(config.plan.path)
        if plan.target == "local":
            plan = jaxmem.verify(plan, build, *shapes)
    elif config.plan.budget == UNPLANNED:
        compiled = jax.jit(build(None), donate_argnums=0).lower(*shapes).compile()
        return Ready(compiled, None, total_bytes(compiled), KEPT)
    else:
        plan = new_plan(config, config.plan.budget, config.plan.target)
    if plan.target == "local":
        return Ready(plan.step, plan, plan.compiled_bytes)
    here = jaxmem.verify(
        dataclasses.replace(plan, target="local", budget_bytes=sys.maxsize), build, *shapes
    )
    return Ready(
        here.step, plan, here.compiled_bytes
    )  # of another target: its budget does not bind here


def named(config: Config) -> Ready:
    """The step under `config.remat`; a search takes its first candidate that compiles within
    `plan.budget`.
    """
    budget = budget_bytes(config) if config.remat.searches else sys.maxsize
    totals: list[int] = []
    for candidate in candidates(config):
        compiled = compile_candidate(config, candidate)
        totals.append(total_bytes(compiled))
        if totals[-1] <= budget:
            return Ready(
                compiled, None, totals[-1], config.remat.policy, candidate.found, len(totals)
            )
    raise InputError(
        f"plan.budget: got {budget:,} bytes; the least of the {len(totals)} steps that remat.policy"
        " ="
        f" {config.remat.policy!r} compiled takes {min(totals):,}; give more, or let remat.policy ="
        " 'plan' choose"
    )


def compile_candidate(config: Config, candidate: Candidate):
    """The step under a candidate's policy, its first argument donated."""
    step = step_over(config, scanned(candidate.policy, candidate.every))
    return jax.jit(step, donate_argnums=0).lower(*abstract(config)).compile()


def budget_bytes(config: Config) -> int:
    """`plan.budget` in bytes: a number, "12GiB", or "90%" of the target's usable memory; left out:
    all of that.
    """
    budget = config.plan.budget
    if isinstance(budget, int):
        return budget
    text, found = "100%" if budget is None else budget.strip(), 0.0
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else 0.0
        found = (
            0.0
            if text.endswith("%")
            else pydantic.TypeAdapter(pydantic.ByteSize).validate_python(text)
        )
    except ValueError:
        share = 0.0
    if 0 < share <= 1:
        found = share * jaxmem.plans.Target.parse(config.plan.target).usable_bytes
    if found < 1:
        raise InputError(
            f"plan.budget: got {budget!r}; allowed: bytes, a text such as '12GiB', or a share such"
            " as '90%'"
        )
    return int(found)


def total_bytes(compiled) -> int:
    """Device bytes of a compiled step: arguments, temporaries and outputs, less what is aliased."""
    m = compiled.memory_analysis()
    return (
        m.argument_size_in_bytes
        + m.temp_size_in_bytes
        + m.output_size_in_bytes
        - m.alias_size_in_bytes
    )

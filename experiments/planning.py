"""The config's plan, and the step that runs under it."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

import jaxmem
from experiments.config import Config
from experiments.step import abstract, make_step

UNPLANNED = "none"


@dataclasses.dataclass(frozen=True)
class Ready:
    """A compiled step on this device. `plan` None: everything is kept. `compiled_bytes` are of this `step`."""

    step: Callable[..., Any]
    plan: jaxmem.Plan | None
    compiled_bytes: int


def new_plan(config: Config, budget: int | str | None, target: str) -> jaxmem.Plan:
    """Plans the config's step from shapes alone: no array of the model's size is made."""
    named = {"all": jaxmem.ALL, "lossless": jaxmem.LOSSLESS}
    wanted = config.plan.actions
    actions: Any = named[wanted] if isinstance(wanted, str) else tuple(wanted)
    return jaxmem.plan(
        functools.partial(make_step, config),
        *abstract(config),
        budget=budget,
        host_budget=config.plan.host_budget,
        target=target,
        actions=actions,
    )


def prepare(config: Config) -> Ready:
    """The step to train with, as `config.plan` says: under a plan's file, a new plan, or none."""
    build, shapes = functools.partial(make_step, config), abstract(config)
    if config.plan.path is not None:
        plan = jaxmem.Plan.load(config.plan.path)
        if plan.target == "local":
            plan = jaxmem.verify(plan, build, *shapes)
    elif config.plan.budget == UNPLANNED:
        compiled = jax.jit(build(None), donate_argnums=0).lower(*shapes).compile()
        return Ready(compiled, None, total_bytes(compiled))
    else:
        plan = new_plan(config, config.plan.budget, config.plan.target)
    if plan.target == "local":
        return Ready(plan.step, plan, plan.compiled_bytes)
    here = jaxmem.verify(dataclasses.replace(plan, target="local", budget_bytes=sys.maxsize), build, *shapes)
    return Ready(here.step, plan, here.compiled_bytes)  # of another target: its budget does not bind here


def total_bytes(compiled) -> int:
    """Device bytes of a compiled step: arguments, temporaries and outputs, less what is aliased."""
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes

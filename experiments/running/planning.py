"""Makes the plan or the named policy of a config, and compiles the step under it."""

import contextlib
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

import jaxmem
import jaxmem.runs
from experiments.config.text import Config
from experiments.errors import InputError, nearest
from experiments.models import registry as models
from experiments.models import sharding
from experiments.models.loops import scanned
from experiments.running.policies import Candidate, candidates
from experiments.steps.accumulate import released_step
from experiments.steps.step import abstract, divided_step, make_step, step_over
from jaxmem.plans import (
    LOSSLESS,
    Action,
    Plan,
    Target,
    compiled_bytes,
    compiler_options,
    parse_budget,
    progress,
)

UNPLANNED, KEPT = "none", "keep_everything"


@dataclasses.dataclass(frozen=True)
class Ready:
    """A compiled step on this device, and its `compiled_bytes`. `plan` is None under a named
    `policy`.

    `found`: the decisions of a search over named policies, after `compiles` compiles. `explained`:
    the result of `jaxmem.explain` for the step; None unless requested. `rectifier` revises the plan
    during training; None unless requested.
    """

    step: Any
    plan: Plan | None
    compiled_bytes: int
    policy: str = "plan"
    found: dict[str, Any] = dataclasses.field(default_factory=dict)
    compiles: int = 1
    explained: Any = None
    rectifier: jaxmem.runs.Rectifier | None = None

    @property
    def baseline_bytes(self) -> int | None:
        """Bytes with everything kept; None if unknown."""
        if self.plan is not None:
            return self.plan.baseline_bytes
        return self.compiled_bytes if self.policy == KEPT else None


def check(config: Config) -> None:
    """Raises InputError, with the key, for settings without a possible plan.

    Reading data and planning may take minutes; this check does neither.
    """
    wanted = config.plan
    with _told_of("plan.target"):
        target = Target.parse(wanted.target)
    if wanted.budget != UNPLANNED:
        budget_bytes(config)
    with _told_of("plan.host_budget"):
        parse_budget(wanted.host_budget, target.host_bytes, "host_budget")
    if target.platform == "cpu" and isinstance(wanted.actions, list):
        allowed = ", ".join(a for a in Action if not a.offloads)
        for action in (a for a in wanted.actions if a.offloads):
            raise InputError(
                f"plan.actions: got '{action}'; allowed for plan.target = {wanted.target!r}:"
                f" {allowed}, since a CPU has no host memory apart from its own"
            )
    if wanted.divides and target.devices == 1:
        raise InputError(
            f"plan.decide: got {wanted.decided}; allowed for plan.target = {wanted.target!r}:"
            " without 'sharding', since it is one device"
        )
    _check_codecs(config)
    if config.mesh.divides:
        sharding.check(config, jax.device_count() if wanted.target == "local" else target.devices)
    if wanted.path is not None:
        with _told_of("plan.path"):
            Plan.load(wanted.path)


def check_run(config: Config) -> None:
    """Raises InputError as `check` does, and for a mesh that these devices cannot train."""
    if config.plan.divides and config.plan.target != "local":
        raise InputError(
            f"plan.target: got {config.plan.target!r}; allowed where a model trains with"
            f" plan.decide = {config.plan.decided}: 'local', since the devices divide the step;"
            " experiments.plan plans for others"
        )
    check(config)
    if config.mesh.divides:
        sharding.check(config, jax.device_count())


def _check_codecs(config: Config) -> None:
    codecs = config.plan.codecs
    by_kind = codecs if isinstance(codecs, dict) else {None: codecs or []}
    for kind, names in by_kind.items():
        key = "plan.codecs" if kind is None else f"plan.codecs.{kind}"
        if kind is not None and kind not in jaxmem.codecs.KINDS:
            kinds = jaxmem.codecs.KINDS
            raise InputError(
                f"{key}: no kind of tensor{nearest(kind, kinds)}; allowed: {', '.join(kinds)}"
            )
        with _told_of(key):
            for name in [names] if isinstance(names, str) else names:
                jaxmem.codecs.parse(name)


@contextlib.contextmanager
def _told_of(key: str) -> Iterator[None]:
    try:
        yield
    except jaxmem.errors.JaxmemError as error:
        raise InputError(f"{key}: {error}") from error


def budget_bytes(config: Config) -> int:
    """Returns `plan.budget` in bytes, as `jaxmem.plan` reads it; default: the usable memory."""
    with _told_of("plan.budget"):
        usable = Target.parse(config.plan.target).usable_bytes
        return parse_budget(config.plan.budget, usable)


def new_plan(config: Config) -> Plan:
    """Plans the config's step from shapes, without allocating arrays of the model."""
    wanted = config.plan
    with progress(), over_devices(config, wanted.target):
        try:
            build, args = _planned(config)
            sizes = {"batch": wanted.batch, "sizes": wanted.sizes}
            among = {"budget": wanted.budget, "target": wanted.target}
            return jaxmem.plan(build, *args, **among, **sizes, **_asked(config))
        except jaxmem.errors.BudgetError as error:
            raise InputError(f"plan.budget: {error}") from error
        except jaxmem.errors.TargetError as error:
            raise InputError(f"plan.target: {error}") from error


def over_devices(config: Config, target: str = "local") -> contextlib.AbstractContextManager:
    """Returns a context with the config's mesh over the devices of a target."""
    if config.plan.divides or (not config.mesh.divides and target != "local"):
        return contextlib.nullcontext()  # the plan makes the mesh
    devices = None if target == "local" else Target.parse(target).devices
    return sharding.within(sharding.over(config.mesh, devices))


def built(config: Config) -> tuple[Callable[..., Any], Any, Any]:
    """Returns the function `build` of `jaxmem.plan`, and the shapes of the step's state and batch.
    If the plan divides the step over devices, `build` returns only the released step, over the axis
    "data".
    """
    state, batch = abstract(config)
    if not config.plan.divides:
        return functools.partial(make_step, config), state, batch
    build = functools.partial(released_step, config, axis_name="data")
    return build, jax.eval_shape(build().init, state.params), batch


def _planned(config: Config) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """Returns the arguments of `jaxmem.plan`: `build`, and the shapes of the step's arguments. The
    batch is a function of its size if the plan chooses `train.batch`.
    """
    build, state, batch = built(config)
    if config.plan.batch is not None:
        mesh = sharding.current()
        batch = lambda size: sharding.rows_shape(models.batch_shape(config.of_size(size)), mesh)
    return build, (state, batch)


def _asked(config: Config) -> dict[str, Any]:
    """Returns the arguments of `jaxmem.plan` that limit a plan's choices."""
    wanted = config.plan
    asked: dict[str, Any] = {"host_budget": wanted.host_budget, "decide": wanted.decided}
    if wanted.codecs is not None:
        asked["codecs"] = wanted.codecs
    if wanted.actions != "all":
        lossless = wanted.actions == "lossless"
        asked["actions"] = LOSSLESS if lossless else wanted.actions
    return asked


def prepare(config: Config) -> Ready:
    """Returns the compiled step for training: under a named policy, a loaded plan, a new plan, or
    no plan. The step runs over the config's mesh.
    """
    if config.remat.policy != "plan":
        with over_devices(config):
            return named(config)
    if config.plan.path is not None:
        plan = loaded(config, config.plan.path)
    elif config.plan.budget == UNPLANNED:
        with over_devices(config):
            return unplanned(make_step(config), *abstract(config))
    else:
        plan = new_plan(config)
    config = config.of_size(plan.batch)
    told: dict[str, Any] = {"explained": explain(config, plan)}
    with over_devices(config):
        given = built(config)
        if config.plan.rectify:
            told["rectifier"] = jaxmem.runs.Rectifier(plan, *given, **_asked(config))
        if config.plan.divides:
            return Ready(divided_step(plan.step), plan, plan.compiled_bytes, **told)
        if plan.target == "local":
            return Ready(plan.step, plan, plan.compiled_bytes, **told)
        # The budget of another target does not apply to this device.
        here = dataclasses.replace(plan, target="local", budget_bytes=sys.maxsize)
        verified = jaxmem.verify(here, *given)
    return Ready(verified.step, plan, verified.compiled_bytes, **told)


def loaded(config: Config, path: str) -> Plan:
    """Returns the plan of a file, verified if it is a plan for this device."""
    with _told_of("plan.path"):
        plan = Plan.load(path)
        if plan.target != "local":
            return plan
        config = config.of_size(plan.batch)
        with over_devices(config):
            return jaxmem.verify(plan, *built(config))


def explain(config: Config, plan: Plan):
    """Returns the memory over the step under the plan and with everything kept, on the plan's
    target; None unless `plan.explain` is set.
    """
    if not config.plan.explain:
        return None
    with over_devices(config, plan.target):
        explained = built(config)
        return jaxmem.explain(*explained, plan=plan, target=plan.target, beside=True)


def unplanned(step: Callable[..., Any], *shapes: Any) -> Ready:
    """Compiles a step without a plan."""
    compiled = _compiled(step, *shapes)
    return Ready(compiled, None, compiled_bytes(compiled), KEPT)


def named(config: Config) -> Ready:
    """Compiles the step under `config.remat`. A search returns its first candidate that compiles
    within `plan.budget`.
    """
    budget = budget_bytes(config) if config.remat.searches else sys.maxsize
    totals: list[int] = []
    for candidate in candidates(config):
        compiled = compile_candidate(config, candidate)
        totals.append(compiled_bytes(compiled))
        if totals[-1] <= budget:
            return Ready(
                compiled, None, totals[-1], config.remat.policy, candidate.found, len(totals)
            )
    raise InputError(
        f"plan.budget: got {budget:,} bytes; the least of the {len(totals)} steps that remat.policy"
        f" = {config.remat.policy!r} compiled takes {min(totals):,}; give more, or let"
        " remat.policy = 'plan' choose"
    )


def compile_candidate(config: Config, candidate: Candidate):
    """Compiles the step under a candidate's policy, with its first argument donated."""
    step = step_over(config, scanned(candidate.policy, candidate.every))
    return _compiled(step, *abstract(config))


def _compiled(step: Callable[..., Any], *shapes: Any) -> jax.stages.Compiled:
    """Compiles a step on this device without a plan. Its first argument is donated, and its
    compiler options are those of a planned step.
    """
    options = compiler_options(step, *shapes)
    return jax.jit(step, donate_argnums=0, compiler_options=options).lower(*shapes).compile()


def plan_into(config: Config, out: pathlib.Path, overwrite: bool = False) -> None:
    """Plans the step, prints the plan, and writes it to the folder `out`. Trains nothing."""
    if config.plan.budget == UNPLANNED:
        raise InputError(
            f"plan.budget: got {UNPLANNED!r}; allowed here: bytes, or a text such as '12GiB' or"
            " '90%'"
        )
    if config.remat.policy != "plan":
        raise InputError(
            f"remat.policy: got {config.remat.policy!r}; allowed here: 'plan', since nothing else"
            " is planned"
        )
    check(config)
    with jaxmem.runs.record(out, overwrite=overwrite) as results:
        plan = new_plan(config)
        print(plan, flush=True)
        results.plan(plan)
        if (explained := explain(config.of_size(plan.batch), plan)) is not None:
            results.explained(explained)
    print(f"wrote {out / 'plan.json'}", file=sys.stderr)

"""What the library answers, as data: to compare with after the library was rewritten inside.

`python -m tests.golden.record` writes the files beside this one. Bytes, assignments and programs
are compared exactly, seconds to six digits.
"""

import contextlib
import dataclasses
import enum
import functools
import importlib
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jaxmem
from benchmarks.shared.steps import MODELS, of_config, shapes, step_of
from jaxmem._core.actions import ALL, Action
from jaxmem._core.profile import Profile
from jaxmem._core.reader import Reader
from jaxmem._cost.profile.options import Allowed
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solve import least_bytes, solve
from jaxmem._planner.traced_step import read_step
from jaxmem._target.compile.backend import Local, backend_for
from jaxmem._target.compile.protocol import Backend, Pricing
from jaxmem._target.devices.target import Target
from tests.golden import cases
from tests.shared.foreign.size import Size
from tests.shared.programs import program

HERE = pathlib.Path(__file__).parent
SIZE = Size(width=64, heads=4, layers=4, batch=4, sequence=96, vocab=128)
LARGER = Size(width=256, heads=8, layers=6, batch=16, sequence=576, vocab=512)  # than a TPU's VMEM
SHARES = (1.0, 0.8, 0.6, 0.4, 0.2)  # of what is kept of everything: rooms that the solver is given
MODULES = ("jaxmem", "jaxmem.codecs", "jaxmem.errors", "jaxmem.layers", "jaxmem.ops",
           "jaxmem.plans", "jaxmem.runs")  # fmt: skip
# What takes time, and which versions made a plan, differ from run to run.
VOLATILE = ("profile_seconds", "solve_seconds", "compile_seconds", "jax_version")


class Case(NamedTuple):
    """A step to plan.

    make: returns what `jaxmem.plan` takes: the `build` and the arguments.
    target: for which it is planned.
    share: of the bytes with everything kept, as the budget; None for the device's memory.
    options: others of `jaxmem.plan`, with `budget` in bytes where `share` is None.
    """

    make: Callable[[], tuple]
    target: str
    share: float | None
    options: dict[str, Any]


def foreign(name: str, size: Size = SIZE) -> tuple:
    loss, params, rest = MODELS[name](size)
    return jaxmem.auto(step_of(loss)), *shapes((params, *rest))


larger = functools.partial(foreign, size=LARGER)


def ours(name: str) -> tuple:
    build, args = of_config(name)
    return build, *args


def _case(make, name, target, share, **options) -> Case:
    return Case(functools.partial(make, name), target, share, options)


STEPS = {
    "gemma": _case(foreign, "gemma, a scan", "h200", 0.6),
    "gemma, tight": _case(foreign, "gemma, a scan", "h200", 0.4),
    "gemma, every codec": _case(foreign, "gemma, a scan", "h200", 0.5, actions=ALL),
    "gemma, lossless": _case(foreign, "gemma, a scan", "h200", 0.5, actions=jaxmem.plans.LOSSLESS),
    "gemma, unrolled": _case(foreign, "gemma, a Python loop", "h200", 0.6),
    "gemma, own checkpoints": _case(foreign, "gemma, a scan of checkpoints", "h200", None),
    "gemma, own checkpoints, less": _case(foreign, "gemma, a scan of checkpoints", "h200", 0.4),
    "gemma, v5e": _case(larger, "gemma, a scan", "v5e", 0.7),
    "chunked loss": _case(foreign, "microbatches, a chunked loss", "h200", 0.7),
    "names twice": _case(foreign, "names twice in a layer", "h200", 0.6),
    "experts": _case(foreign, "mixture of experts", "h200", 0.7),
    "encoder and decoder": _case(foreign, "encoder and decoder", "h200", 0.7),
    "over time": _case(foreign, "recurrent over time", "h200", 0.7),
    "Linen": _case(foreign, "Linen, nn.scan", "h200", 0.6),
    "Linen, v5e": _case(larger, "Linen, nn.scan", "v5e", 0.7),
    "GPT-2": _case(foreign, "Transformers, GPT-2", "h200", 0.6),
    "Equinox": _case(foreign, "Equinox, a scan", "h200", 0.6),
    "gpt_nano": _case(ours, "gpt_nano", "h200", 0.5),
    "gpt_nano, here": _case(ours, "gpt_nano", "local", 0.6),
    "states placed, v5e": Case(
        cases.released, "v5e", None, {"decide": ("actions", "states"), "budget": 12_500_000}
    ),
    "states divided, v5e:4": Case(
        functools.partial(cases.released, "data"), "v5e:4", None,
        {"decide": ("actions", "states", "sharding"), "budget": 5_500_000},
    ),
    "groups of layers": Case(cases.stacked, "h200", None, {"budget": 60_000_000}),
    "measured": Case(cases.measured, "local", 0.8, {"measure": 3.0}),
}  # fmt: skip
PROFILED = (
    "gemma", "gemma, unrolled", "gemma, v5e", "chunked loss", "names twice", "experts",
    "encoder and decoder", "over time", "Linen", "GPT-2", "Equinox", "gpt_nano",
)  # fmt: skip


def rounded(data: Any) -> Any:
    """The same data, its numbers to six digits."""
    if isinstance(data, float):
        return float(f"{data:.6g}")
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    return [rounded(value) for value in data] if isinstance(data, list | tuple) else data


# -- Profiles, and what the solver answers to them.


def profiled(case: Case) -> dict[str, Any]:
    build, *args = case.make()
    with backend_for(Target.parse(case.target), workers=1) as backend:
        made = read_step(StepCompiler(build, tuple(args), backend), None, Allowed(ALL, ALL)).profile
    return as_data(made)


def as_data(made: Profile) -> dict[str, Any]:
    def plain(value):
        return str(value) if isinstance(value, Action) else value

    pairs = lambda items: {key: plain(value) for key, value in items}
    return json.loads(json.dumps(dataclasses.asdict(made, dict_factory=pairs)))


def solved(data: dict[str, Any]) -> list[dict[str, Any]]:
    """What the solver answers to a profile: the fastest assignment within each share of what is
    saved of everything, and the one of least bytes.
    """
    made = Reader().read(Profile, data)
    kept = sum(block.layers * block.everything_bytes for block in made.blocks)
    problems = [ActionProblem(made, int(share * kept)) for share in SHARES]
    answers = [*map(solve, problems), least_bytes(ActionProblem(made))]
    return [_answer(answer) for answer in answers]


def _answer(answer) -> dict[str, Any] | None:
    if answer is None:
        return None
    return rounded(
        {
            "actions": {
                block: {tag: str(choice) for tag, choice in sorted(tags.items())}
                for block, tags in sorted(answer.actions.items())
            },
            "saved_bytes": answer.saved_bytes,
            "host_bytes": answer.host_bytes,
            "seconds": answer.seconds,
        }
    )


# -- Plans.


def planned(case: Case) -> dict[str, Any]:
    """A plan's file, and a hash of its program, where the device is here. Nothing that was measured
    or compiled before is read. Times of the device at hand are computed from its rates, and with
    `measure=` the times of whole steps from their bytes.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.dict(os.environ, XDG_CACHE_HOME=folder))
        patched.enter_context(mock.patch.object(Local, "times", Pricing.times))
        run = cases.seconds_by_bytes if "measure" in case.options else Backend.run
        patched.enter_context(mock.patch.object(Local, "run", run))
        return _planned(case)


def plan_of(name: str) -> dict[str, Any]:
    """A plan's file, as it is recorded."""
    case = STEPS[name]
    return planned_alone(name) if case.target == "local" else planned(case)


def planned_alone(name: str) -> dict[str, Any]:
    """`planned` of a step for the device at hand, in a process of one core and with XLA's flags of
    tests: XLA's programs for a CPU follow the cores and the flags.
    """
    line = [sys.executable, "-W", "ignore", "-m", "tests.golden.record", "plan", name]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def _planned(case: Case) -> dict[str, Any]:
    build, *args = case.make()
    how = {"target": case.target} | case.options
    if case.share is not None:
        how["budget"] = int(case.share * jaxmem.plan(build, *args, **how).baseline_bytes)
    made = jaxmem.plan(build, *args, **how)
    data = {key: value for key, value in made.to_json().items() if key not in VOLATILE}
    if case.target == "local":
        data = without_seconds(data)
        data["program"] = program(made.step)
    return rounded(data)


def without_seconds(data: Any) -> Any:
    """Times of the device at hand differ from machine to machine, as does what is said of them."""
    if isinstance(data, dict):
        kept = {k: v for k, v in data.items() if "seconds" not in k and k not in ("points", "rows")}
        return {key: without_seconds(value) for key, value in kept.items()}
    return data


# -- Public names.


def public() -> dict[str, dict[str, str]]:
    """Each public name with its signature, by module."""
    return {name: _names(importlib.import_module(name)) for name in MODULES}


def _names(module) -> dict[str, str]:
    found = {}
    for name in sorted(getattr(module, "__all__", None) or dir(module)):
        if name.startswith("_"):
            continue
        value = getattr(module, name)
        if inspect.ismodule(value):
            found[name] = "module"
            continue
        if isinstance(value, enum.EnumMeta):
            found[name] = ", ".join(value.__members__)
            continue
        try:
            found[name] = _parameters(inspect.signature(value))
        except (TypeError, ValueError):
            found[name] = type(value).__name__
    return found


def _parameters(signature: inspect.Signature) -> str:
    """A signature without its annotations, which name modules of the library."""
    named = {n: p for n, p in signature.parameters.items() if n.strip("*")[0] != "_"}
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in named.values()]
    shown = str(inspect.Signature(bare))
    return re.sub(r" at 0x[0-9a-f]+", "", shown)

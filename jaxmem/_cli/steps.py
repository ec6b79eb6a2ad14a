"""`jaxmem plan`, `verify`, `estimate` and `explain`: the commands about a step, which run the
user's code. Each function runs one command, and returns its exit code.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxmem._cli.entry import load_entry
from jaxmem._cli.output import check_outputs, deliver, show_result
from jaxmem._cli.plans import show_plan
from jaxmem._core.assignment import Assignment
from jaxmem._core.bytes import show_bytes
from jaxmem._core.files import write_json
from jaxmem._core.progress import LOG, progress
from jaxmem._model.auto.auto import auto
from jaxmem._model.auto.found_layers import found_layers, layer_data, layer_text
from jaxmem._model.codecs.registry import parse
from jaxmem._planner.explain.explain import explain as make_explanation
from jaxmem._planner.frontier import frontier as make_frontier
from jaxmem._planner.plan import plan as make_plan
from jaxmem._planner.user_assignments import estimate as make_estimate
from jaxmem._planner.user_assignments import price
from jaxmem._planner.verify import verify as verify_plan
from jaxmem._result.frontier import Frontier
from jaxmem._result.memory.explanation import Explanation
from jaxmem._result.plan.file import read_assignment
from jaxmem._result.plan.plan import Plan
from jaxmem._trace.arguments import sized
from jaxmem._train.report.facts import PIECE_SOURCES
from jaxmem._train.report.report import report as write_report
from jaxmem._train.report.report import report_frontier
from jaxmem.errors import JaxmemError


def plan(args: argparse.Namespace) -> None:
    # Files, codecs and numbers are checked before the user's code runs, which may take long.
    outputs = {"--out": args.out, "--report": args.report}
    check_outputs(outputs, {_code(args): "the step's own code"})
    _check_together(args)
    asked = {
        "host_budget": args.host_budget,
        "target": args.target,
        "actions": args.actions,
        "codecs": _codecs(args.codecs),
        "microbatches": _numbers("microbatches", args.microbatches),
        "decide": ("actions",) if args.decide is None else _words(args.decide),
        "fresh": args.fresh,
    }
    made, page = (_frontier if args.frontier else _planned)(args, asked)
    table = lambda: show_plan(made) if isinstance(made, Plan) else print(made)
    writes = [("--out", args.out, made.save), ("--report", args.report, page)]
    deliver(lambda: show_result(args, made.to_json(), table), writes)


def _planned(args: argparse.Namespace, asked: dict[str, Any]) -> tuple[Plan, Callable]:
    """The plan of `plan` without --frontier, and the function that writes its page.

    asked: the arguments that plans and frontiers share.
    """
    sizes, measure = _numbers("sizes", args.sizes), _seconds(args.measure)
    asked |= {"budget": args.budget, "batch": args.batch, "sizes": sizes, "measure": measure}
    policy = _policy(args)
    with _step(args) as (build, arguments):
        if policy is not None:
            made = price(build, policy, *arguments, target=args.target)
        else:
            made = make_plan(build, *arguments, **asked)
        arguments = _sized(arguments, made)
        explained = _explained(args, made, build, arguments) if args.report else None
    return made, functools.partial(write_report, made, explained=explained)


def _frontier(args: argparse.Namespace, asked: dict[str, Any]) -> tuple[Frontier, Callable]:
    """The frontier of `plan` with --frontier, as `_planned` returns a plan."""
    asked |= {"batches": _numbers("batches", args.batches), "budgets": _words(args.budgets)}
    with _step(args) as (build, arguments):
        made = make_frontier(build, *arguments, tokens=args.tokens, **asked)
    return made, functools.partial(report_frontier, made)


def _check_together(args: argparse.Namespace) -> None:
    """Raises JaxmemError for options that belong to plans beside --frontier, for options that
    belong to --frontier without it, and for --frontier without sizes and budgets.
    """
    required = ("batches", "budgets")
    of_plans = ("budget", "batch", "sizes", "measure", "policy")
    for option in of_plans if args.frontier else (*required, "tokens"):
        if getattr(args, option) is not None:
            how = "not used with" if args.frontier else "used only with"
            raise JaxmemError(f"--{option}: it is {how} --frontier; leave it out")
    if args.frontier and any(getattr(args, option) is None for option in required):
        raise JaxmemError(
            "--frontier: expected --batches and --budgets too, such as --batches 8,16,32 --budgets"
            " 20GiB,40GiB"
        )


def _sized(arguments: tuple, plan: Plan | None) -> tuple:
    """The arguments for the plan's size of the batch, if the plan has one."""
    return arguments if plan is None or plan.batch is None else sized(arguments, plan.batch)


def _explained(
    args: argparse.Namespace, made: Plan, build: Callable, arguments: tuple
) -> Explanation | None:
    """The explanation of a plan's memory, for its page. None if the step cannot be explained."""
    LOG.info("compiling the plan and everything kept once more, to draw their memory")
    try:
        return make_explanation(build, *arguments, plan=made, target=args.target, beside=True)
    except JaxmemError as error:  # the plan is made, and its page shows all the rest
        LOG.info("the page does not show memory over the schedule: %s", error)
        return None


def verify(args: argparse.Namespace) -> None:
    # the two arguments in the other order
    if not pathlib.Path(args.plan).exists() and pathlib.Path(args.step).is_file():
        raise JaxmemError(
            f"expected PLAN.json, then MODULE:FUNCTION; got {args.plan!r}, then {args.step!r}"
        )
    loaded = Plan.load(args.plan)
    with _step(args) as (build, arguments):
        LOG.info("compiling the step under the plan")
        found = verify_plan(loaded, build, *_sized(arguments, loaded))
    names = ("target", "budget_bytes", "compiled_bytes", "host_bytes")
    figures = {name: getattr(found, name) for name in names}
    figures |= {"planned_bytes": loaded.compiled_bytes}
    host = f", and {show_bytes(found.host_bytes)} in host memory" if found.host_bytes else ""
    text = (
        f"the plan is this step's, and fits: it compiles to {show_bytes(found.compiled_bytes)}"
        f"{host} on {found.target}; its budget is {show_bytes(found.budget_bytes)}, and when it was"
        f" made it compiled to {show_bytes(loaded.compiled_bytes)}"
    )
    show_result(args, figures, text)


def estimate(args: argparse.Namespace) -> None:
    policy = Assignment(read_assignment(args.policy))
    with _step(args) as (build, arguments):
        found = make_estimate(build, policy, *arguments, target=args.target)
    more = 1e3 * found.seconds_more
    saved, arguments = show_bytes(found.saved_bytes), show_bytes(found.arguments_bytes)
    text = (
        f"not compiled: the step takes about {show_bytes(found.bytes)} on {args.target}, of which"
        f" {arguments} are arguments and {saved} saved for the backward; with everything kept about"
        f" {show_bytes(found.baseline_bytes)}. It takes {abs(more):.2f} ms"
        f" {'longer' if more >= 0 else 'less'} than with everything kept"
        f" ({PIECE_SOURCES[found.time_source]})"
    )
    show_result(args, dataclasses.asdict(found), text)


def explain(args: argparse.Namespace) -> None:
    if args.beside and args.plan is None:
        raise JaxmemError("--beside: everything kept stands beside a plan; name one by --plan FILE")
    chosen = None if args.plan is None else Plan.load(args.plan)
    inputs = {_code(args): "the step's own code"}
    if args.plan is not None:
        inputs[args.plan] = "the plan"
    check_outputs({"--out": args.out}, inputs)
    with _step(args) as (build, arguments):
        arguments = _sized(arguments, chosen)
        layers = found_layers(build(None), arguments) if args.auto else ()
        target = args.target or (chosen.target if chosen else "local")
        LOG.info("compiling the step, and reading its buffers")
        found = make_explanation(build, *arguments, plan=chosen, target=target, beside=args.beside)
    told = {"layers": [*map(layer_data, layers)]} if args.auto else {}
    data = told | found.to_json()
    text = "\n\n".join([*map(layer_text, layers), str(found)])
    write = ("--out", args.out, lambda path: write_json(path, data))
    deliver(lambda: show_result(args, data, text), [write])


def _code(args: argparse.Namespace) -> str:
    """The path of the file that holds the step."""
    module = args.step.rpartition(":")[0]
    return module if module.endswith(".py") else f"{module.replace('.', '/')}.py"


@contextlib.contextmanager
def _step(args: argparse.Namespace) -> Iterator[tuple[Callable, tuple]]:
    """Gives the statement `build` and the step's arguments, and shows the progress of planning.
    With --auto, `build` is made from the step itself. With --json, the output of the user's code
    goes to standard error, so that standard output holds JSON alone.
    """
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        first, arguments = load_entry(args.step)
        with progress():
            yield (auto(first) if args.auto else first), arguments


def _words(text: str) -> list[str]:
    """The words of a list with commas."""
    return [word.strip() for word in text.split(",")]


def _numbers(option: str, text: str | None) -> Sequence[int] | None:
    """The whole numbers that an option lists, or the numbers of a range START:STOP:STEP."""
    if text is None:
        return None
    ends = [word.strip() for word in text.split(":")]
    words = ends if len(ends) == 3 else _words(text)
    are_numbers = all(word.isascii() and word.isdecimal() for word in words)
    if not are_numbers or (words is ends and int(ends[2]) == 0):
        raise JaxmemError(
            f"--{option}: got {text!r}; expected whole numbers of at least 1 with commas between"
            " them, such as 1,2,4, or START:STOP:STEP, such as 8:4097:8"
        )
    numbers = [int(word) for word in words]
    return range(*numbers) if words is ends else numbers


def _policy(args: argparse.Namespace) -> Assignment | None:
    """The assignment that `--policy` names, with which nothing is left to choose."""
    if args.policy is None:
        return None
    chosen = ("budget", "host_budget", "actions", "codecs", "microbatches", "measure")
    for option in (*chosen, "batch", "sizes", "decide"):
        if getattr(args, option) is not None:
            name = option.replace("_", "-")
            raise JaxmemError(
                f"--policy: its file says what becomes of each tag, and --{name} says what to"
                f" choose by; leave one of them out"
            )
    return Assignment(read_assignment(args.policy))


def _seconds(text: str | None) -> float | None:
    """The seconds that `--measure` gives."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise JaxmemError(f"--measure: got {text!r}; expected seconds above 0, such as 30")
    return seconds


def _codecs(texts: list[str] | None) -> list[str] | None:
    """The codecs of every `--codecs`, checked; their texts hold commas, so `;` stands between."""
    if texts is None:
        return None
    words = [word for text in texts for word in text.split(";")]
    try:
        return [str(parse(word)) for word in words]
    except JaxmemError as error:
        listed = any("," in word.partition("(")[0] for word in words)
        hint = "; several stand with ';' between them" if listed else ""
        raise JaxmemError(f"--codecs: {error}{hint}") from None

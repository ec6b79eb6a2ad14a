"""The command line: its commands and their options. Imports no JAX, so that `--help` is quick."""

import argparse
import difflib

from jaxmem._core.versions import installed

BAD_INPUT = 2
STEP = (
    "where FUNCTION takes nothing and returns (build, *args), as jaxmem.plan gets them;"
    " FILE.py:FUNCTION will do too"
)
AUTO = (
    "FUNCTION returns the training step itself, as it is: jaxmem finds its layers and what is worth"
    " deciding in them (jaxmem.auto)"
)
BUDGET = (
    'bytes of the whole step on one device, "12GiB", or "90%%" of the usable memory (default: all'
    " of it)"
)
TARGET = (
    'the device to plan for: "local" (default), a GPU such as h200, or a100-80gb:8; a TPU such as'
    " v5e, or v5e:4x4 (`jaxmem targets`)"
)
ACTIONS = (
    '"all", "lossless", or a list such as keep,recompute,offload; left out: all, but no codec for'
    " what checkpoint_name names"
)
CODECS = (
    "try these codecs for every tag that names none, such as grouped_symmetric or"
    ' "outlier_separated(capacity=4)"; several with ";" between them, or the option again'
)
HAND = "JSON of block -> tag -> action, or a plan's file"
POLICY = f"choose nothing: tell what the actions in this file take, compiled; {HAND}"
MEASURE = (
    "run what may be fastest for so long, in turns on the device at hand, and take the fastest"
)
MICROBATCHES = (
    "choose among these numbers of microbatches, such as 1,2,4: build(plan, microbatches=N)"
    " returns the step with N"
)
BATCH = (
    'choose the size of the batch: "max", the largest that fits, or "fastest", of the highest'
    " throughput; FUNCTION returns lambda n: ... for each argument that depends on the size"
)
SIZES = "the sizes to choose from, such as 8,16,32, or 8:4097:8 for range(8, 4097, 8)"
DECIDE = (
    "what the plan decides: actions (default), or a list such as actions,states,sharding: where the"
    " states of a released step are stored, and what several devices divide; microbatches too"
)
FRONTIER = (
    "print step time, throughput and bytes for each of --batches and each of --budgets, from"
    " estimates, and compile the best size for each budget"
)
TOKENS = "with --frontier: tokens of one example, to print tokens a second"
FRESH = "read nothing that earlier plans timed, compiled or tried; for a machine that was busy then"


class Parser(argparse.ArgumentParser):
    """argparse, with the nearest command or option named where one is unknown."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str):
        """Ends with argparse's message, the nearest known word if there is one, and the usage."""
        # argparse names the unknown word in its message only, so the message is searched.
        words = message.replace("'", " ").replace("=", " ").split()
        known = [o for a in self._actions for o in (*a.option_strings, *(a.choices or ()))]
        unknown = [w for w in words if w not in known and not w.endswith(":")]
        near = [
            n
            for w in unknown
            if len(w) > 2
            for n in difflib.get_close_matches(w.lower(), known, n=1, cutoff=0.7)
        ]
        unrecognized = message.startswith(("unrecognized", "argument COMMAND"))
        hint = f"; did you mean {near[0]}?" if near and unrecognized else ""
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}{hint}\n{self.format_usage()}")


class Version(argparse.Action):
    """Prints the versions that a report of a defect needs, and ends."""

    def __call__(self, parser, *_):
        beside = (f"{name} {installed(name) or 'not installed'}" for name in ("jax", "jaxlib"))
        print(f"jaxmem {installed('jaxmem') or 'of unknown version'} ({', '.join(beside)})")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the whole line. In the parsed arguments, `command` names a function of
    `steps`, `plans` or `machine`, and `parser` is the command's own parser.
    """
    top = Parser(
        "jaxmem",
        description="Fit a JAX training step into a byte budget at the least cost in time.",
    )
    top.add_argument("--version", action=Version, nargs=0, help="print versions")
    _add_debug(top)
    commands = top.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        made.set_defaults(parser=made)
        _add_debug(made)
        return made

    _add_plan(command)
    _add_step_commands(command)
    _add_plan_commands(command)
    _add_machine_commands(command)
    return top


def _add_plan(command) -> None:
    """Adds the command `plan`."""
    one = command(
        "plan", "choose an action for every tagged tensor, and compile the step within the budget"
    )
    _add_step(one)
    one.add_argument("--budget", metavar="B", help=BUDGET)
    one.add_argument("--host-budget", metavar="B", help="the same for tensors in host memory")
    one.add_argument("--target", metavar="T", default="local", help=TARGET)
    one.add_argument("--actions", metavar="A", help=ACTIONS)
    one.add_argument("--codecs", metavar="C", action="append", help=CODECS)
    one.add_argument("--microbatches", metavar="N,N", help=MICROBATCHES)
    one.add_argument("--batch", metavar="GOAL", help=BATCH)
    one.add_argument("--sizes", metavar="N,N", help=SIZES)
    one.add_argument("--decide", metavar="D,D", help=DECIDE)
    one.add_argument("--measure", metavar="SECONDS", help=MEASURE)
    one.add_argument("--policy", metavar="FILE", help=POLICY)
    one.add_argument("--fresh", action="store_true", help=FRESH)
    one.add_argument("--frontier", action="store_true", help=FRONTIER)
    one.add_argument("--batches", metavar="N,N", help="with --frontier: sizes, as for --sizes")
    one.add_argument("--budgets", metavar="B,B", help="with --frontier: such as 20GiB,40GiB")
    one.add_argument("--tokens", type=int, metavar="N", help=TOKENS)
    one.add_argument("--out", metavar="FILE", help="write the plan here, as JSON")
    one.add_argument("--report", metavar="FILE", help="write a page about the plan here, as HTML")
    one.add_argument("--json", action="store_true", help="print the plan as JSON, not as a table")


def _add_step_commands(command) -> None:
    """Adds the commands about a step: `verify`, `estimate`, `explain`."""
    one = command("verify", "check that a plan is this step's, and compile the step under it")
    one.add_argument("plan", metavar="PLAN.json")
    _add_step(one)
    one.add_argument("--json", action="store_true", help="print JSON")

    one = command("estimate", "tell what actions written by hand would take, without a compile")
    one.add_argument("policy", metavar="FILE", help=HAND)
    _add_step(one)
    one.add_argument("--target", metavar="T", default="local", help=TARGET)
    one.add_argument("--json", action="store_true", help="print JSON")

    one = command("explain", "tell what holds the peak of a step's memory, by name")
    _add_step(one, f"{AUTO}; and print what it finds, with its lines")
    one.add_argument(
        "--plan", metavar="FILE", help="under this plan (default: the step as written)"
    )
    one.add_argument(
        "--beside", action="store_true", help="explain everything kept too, beside the plan"
    )
    one.add_argument("--out", metavar="FILE", help="write it here, as JSON")
    one.add_argument(
        "--target", metavar="T", help=TARGET.replace("(default)", "(default: the plan's, or this)")
    )
    one.add_argument("--json", action="store_true", help="print JSON")


def _add_plan_commands(command) -> None:
    """Adds the commands about plans: `show`, `diff`, `report`."""
    one = command("show", "print a plan or a frontier as a table")
    one.add_argument("plan", metavar="PLAN.json", help="the file, or that of a frontier")
    one.add_argument("--json", action="store_true", help="print it as JSON: the file, checked")

    one = command("diff", "print what differs between two plans")
    one.add_argument("first", metavar="A.json")
    one.add_argument("second", metavar="B.json")
    one.add_argument("--json", action="store_true", help="print JSON")

    one = command(
        "report", "write a page, HTML in one file, about runs of experiments, plans, or a frontier"
    )
    one.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a folder with plan.json, or a file of --out",
    )
    one.add_argument(
        "--out", metavar="FILE", help="the page (default: report.html in the first folder)"
    )


def _add_machine_commands(command) -> None:
    """Adds the commands about the machine: `targets`, `calibrate`, `doctor`, `cache`."""
    one = command("targets", "list the devices that can be planned for")
    one.add_argument("--json", action="store_true", help="print JSON")

    one = command(
        "calibrate", "replace a GPU's datasheet rates by those that a check on it measured"
    )
    one.add_argument(
        "folder", metavar="DIR", help="what `python -m experiments.gpu_check --out DIR` left"
    )
    one.add_argument("--out", metavar="FILE", help="write here (default: the package's own data)")

    one = command("doctor", "look at versions, devices and settings, and say what is amiss")
    one.add_argument("--json", action="store_true", help="print JSON")

    one = command("cache", "tell where the times and compiles of earlier plans lie, or remove them")
    one.add_argument("--clear", action="store_true", help="remove them")
    one.add_argument("--json", action="store_true", help="print JSON")


def _add_step(parser: argparse.ArgumentParser, auto: str = AUTO) -> None:
    """Adds the step and `--auto`.

    auto: the help text of `--auto`.
    """
    parser.add_argument("step", metavar="MODULE:FUNCTION", help=STEP)
    parser.add_argument("--auto", action="store_true", help=auto)


def _add_debug(parser: argparse.ArgumentParser) -> None:
    """Adds `--debug`, which is allowed before and after the command. Without a default neither
    parser overwrites the value that the other parser read.
    """
    parser.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show the traceback of an error",
    )

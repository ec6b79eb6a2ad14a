"""Who may import whom, read from the sources without importing them: the tables of CONTRIBUTING.md,
over all imports, those inside functions too.
"""

import ast
import re

import pytest

from jaxmem._core.actions import Action
from jaxmem._result.action_styles import LOOKS
from tests.shared import sizes
from tests.shared.sources import (
    PATHS,
    ROOT,
    Import,
    dependencies,
    imports,
    imports_of,
    in_package,
    module_of,
    ours,
    room,
    tree_of,
    within,
)

pytestmark = pytest.mark.core


def table(head: str) -> dict[str, tuple[str, ...]]:
    """What each row of a table of CONTRIBUTING.md may import: the names in its last cell."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rows = re.findall(
        r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", text[text.index(head) :].split("\n\n")[0], re.M
    )
    return {name: tuple(re.findall(r"`(\w+)`", cell)) for name, cell in rows}


# What each room of jaxmem may import of the others.
LIBRARY = table("| Room")
# Public modules, which only users, `_public`, `_cli` and the package itself import.
FACES = ("codecs", "layers", "ops", "plans", "runs", "cli", "_public", "__main__")
ABOVE = ("_cli", *FACES)  # may import everything of the library
BELOW = {"errors": ()} | {name: may for name, may in LIBRARY.items() if name not in ABOVE}
KERNELS = {"_trace", "_model", "_target"}  # rooms that use jaxmem_kernels

EXPERIMENTS = table("| Package of `experiments/`")

NO_JAX = (
    "jaxmem.errors",
    "jaxmem._core",
    "jaxmem._planner.solve",
    "jaxmem._planner.placement.layer",
    "jaxmem._planner.placement.front",
    "jaxmem._planner.placement.program",
    "jaxmem._result.memory",
)
# Packages that are imported inside functions alone: optional, or slow to import.
LAZY = {
    "flax": {"layers"},
    "orbax": {"_target"},
    "rich": {"_cli", "_core"},
    "tensorboardX": {"_train"},
}
OPTAX = {"_optim"}
# The few files that know how JAX is built.
JAX_INTERNALS = {
    "jaxmem._model.tags.primitive",
    "jaxmem._train.rectifier.mark",
    "jaxmem_kernels.dispatch",
}


# Files that choose actions for named tensors, as a user does, and MaxText's own words for places,
# one of which is "offload". A new action changes none of them.
HAND_WRITTEN = (
    "experiments.running.policies",
    "experiments.gpu_check.parts",
    "jaxmem._result.plan.maxtext",
)


EXPORTED = {
    alias.asname or alias.name: alias.asname == alias.name
    for node in tree_of("jaxmem._public").body
    if isinstance(node, ast.Import | ast.ImportFrom)
    for alias in node.names
}
PUBLIC = {name for name, again in EXPORTED.items() if again}  # re-exported as `X as X`


def violations(modules, forbidden) -> list[str]:
    return [
        f"{m} imports {n}"
        for m in modules
        for n in sorted({i.module for i in imports_of(m)})
        if forbidden(n)
    ]


def private(name: str) -> bool:
    """A name of jaxmem that is neither public nor an attribute of a public one; the command's
    module is public too.
    """
    head, _, rest = name.partition(".")
    if head != "jaxmem" or rest in ("", "__version__"):
        return False
    return rest.split(".")[0] not in PUBLIC | {"cli"} or "._" in name


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Nodes that can reach themselves."""

    def reached(node: str) -> set[str]:
        seen: set[str] = set()
        todo = [*graph[node]]
        while todo:
            if (here := todo.pop()) not in seen:
                seen.add(here)
                todo += graph.get(here, ())
        return seen

    return [node for node in graph if node in reached(node)]


def test_every_package_has_a_row():
    known = {*LIBRARY, *FACES, "errors", ""}
    assert len(LIBRARY) <= 10
    assert {room(m) for m in in_package("jaxmem")} <= known
    assert set(LIBRARY) <= {room(m) for m in in_package("jaxmem")}
    mains = {"", "train", "train_glue", "train_images", "plan"}
    assert {room(m) for m in in_package("experiments")} == {*EXPERIMENTS, *mains}


def test_the_table_itself_has_no_circle():
    assert circles({name: set(may) for name, may in LIBRARY.items()}) == []
    assert circles({name: set(may) for name, may in EXPERIMENTS.items()}) == []


@pytest.mark.parametrize(
    ("package", "rooms", "open_to_all"),
    [
        ("jaxmem", BELOW, {"errors"}),
        ("experiments", EXPERIMENTS, {"", "errors"}),
    ],
)
def test_no_arrow_goes_against_the_table(package, rooms, open_to_all):
    wrong = [
        f"{module} imports {file}"
        for module in in_package(package)
        for file in sorted(dependencies(module))
        if room(module) in rooms and within(file, package)
        if room(file) not in {room(module), *open_to_all, *rooms[room(module)]}
    ]
    assert wrong == []


def test_nothing_imports_a_face():
    within_library = [m for m in in_package("jaxmem") if room(m) not in ABOVE and m != "jaxmem"]
    faces = {f"jaxmem.{face}" for face in FACES}
    assert [m for m in within_library if dependencies(m) & faces] == []


def test_there_is_no_circle_of_files():
    assert circles({module: dependencies(module) for module in PATHS}) == []


def test_a_private_name_never_crosses_a_file():
    def crosses(name: str, module: str) -> bool:
        file = ours(name)
        if file is None or file == module:
            return False
        rest = name.removeprefix(file).strip(".").split(".")[0]
        return rest.startswith("_") and not rest.startswith("__")

    library = in_package("jaxmem") + in_package("jaxmem_kernels") + in_package("experiments")
    found = [
        (m, n) for m in library for n in sorted({i.module for i in imports_of(m)}) if crosses(n, m)
    ]
    assert found == []


def test_the_words_and_the_solver_are_free_of_jax():
    modules = [m for m in in_package("jaxmem") if within(m, *NO_JAX)]
    assert len(modules) > 15
    assert violations(modules, lambda name: within(name, "jax", "jaxlib", "flax", "optax")) == []


def compares_a_platform(tree: ast.Module) -> bool:
    """Whether code compares a platform's name, as `target.platform == "tpu"` does."""
    named = lambda node: isinstance(node, ast.Attribute) and node.attr == "platform"
    compared = (n for n in ast.walk(tree) if isinstance(n, ast.Compare))
    return any(any(map(named, (c.left, *c.comparators))) for c in compared)


def test_no_room_but_the_target_asks_for_a_platform_by_name():
    """Other rooms read facts of `Target.traits`."""
    modules = [m for m in in_package("jaxmem") if room(m) != "_target"]
    found = [m for m in modules if compares_a_platform(tree_of(m))]
    assert found == []
    assert compares_a_platform(ast.parse("if a.platform in ('cpu', 'tpu'): pass"))


def names_an_action(tree: ast.Module) -> bool:
    """Whether a source names a member of `Action`, by its name or by its value. KEEP and RECOMPUTE,
    the choices of a tensor that no plan decides, are no members.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name("Action"), attr) if attr in Action.__members__:
                return True
            case ast.Subscript(ast.Name("Action")) | ast.alias("OFFLOAD"):
                return True
            case ast.Constant(str(value)) if value in list(Action):
                return True
    return False


def test_an_action_is_added_in_the_few_files_that_the_guide_lists():
    """Other files read properties of `Action`, so that they serve an action without a change."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    guide = text[text.index("**An action.**") : text.index("**A codec.**")]
    listed = {module_of(ROOT / path) for path in re.findall(r"^- `(\S+\.py)`:", guide, re.M)}
    assert listed <= set(SOURCES)
    assert len(listed) <= 4
    by_hand = [m for m in SOURCES if within(m, *HAND_WRITTEN)]
    named = {m for m in SOURCES if names_an_action(tree_of(m))}
    assert named - listed - set(by_hand) == set()
    assert {"jaxmem._core.actions", "jaxmem._result.action_styles"} <= named & listed
    assert set(LOOKS) == set(Action)
    for branch in ("a is Action.KEEP", "a == 'offload'", "Action['COMPRESS']"):
        assert names_an_action(ast.parse(branch))
    assert names_an_action(ast.parse("from jaxmem._core.actions import OFFLOAD"))
    assert not names_an_action(ast.parse("choice.action.offloads and Action(name).encodes"))


@pytest.mark.parametrize(
    ("package", "above"),
    [
        ("jaxmem_kernels", ("jaxmem", "experiments", "benchmarks", "tests")),
        ("jaxmem", ("experiments", "benchmarks", "tests", "pydantic")),
        ("experiments", ("jaxmem_kernels", "kernels", "benchmarks", "tests")),
    ],
)
def test_a_package_imports_nothing_that_is_above_it(package, above):
    assert violations(in_package(package), lambda name: within(name, *above)) == []


def test_few_rooms_use_kernels():
    users = {
        room(m) for m in in_package("jaxmem") if dependencies(m) & {*in_package("jaxmem_kernels")}
    }
    assert users <= KERNELS


def test_optional_packages_stay_where_they_belong():
    library = in_package("jaxmem") + in_package("jaxmem_kernels")
    optax = [m for m in library if room(m) not in OPTAX]
    assert violations(optax, lambda name: within(name, "optax")) == []
    for package, rooms in LAZY.items():
        elsewhere = [m for m in library if room(m) not in rooms]
        assert violations(elsewhere, lambda name, p=package: within(name, p)) == []
        at_import = [
            m for m in library for name, top in imports_of(m) if top and within(name, package)
        ]
        assert at_import == []


def test_users_of_the_library_import_only_its_public_names():
    assert violations(in_package("experiments"), private) == []


def test_benchmarks_import_of_the_tests_only_what_they_share():
    wrong = lambda name: within(name, "tests") and not within(name, "tests.shared")
    assert violations(in_package("benchmarks"), wrong) == []


def test_few_files_touch_jax_internals():
    others = [m for m in PATHS if room(m) != "_trace" and m not in JAX_INTERNALS]
    others = [m for m in others if not within(m, "tests")]
    assert violations(others, lambda name: within(name, "jax.extend", "jax.interpreters")) == []
    assert violations(PATHS, lambda name: within(name, "jax._src", "jaxlib")) == []


SOURCES = in_package("jaxmem") + in_package("jaxmem_kernels") + in_package("experiments")


def test_files_are_short():
    """A file of one idea may have 500 lines."""
    lengths = {m: len(PATHS[m].read_text().splitlines()) for m in SOURCES}
    assert {m: n for m, n in lengths.items() if n > 500} == {}


def test_code_is_counted_without_comments_and_docstrings():
    source = '"""A page."""\n\nx = 1  # one\n# two\ndef f():\n    """Says.\n\n    """\n'
    source += "    return (\n    x\n    )\n"  # its parentheses are code
    assert sizes.code_lines(source) == 5


def test_the_library_grows_no_further():
    """These numbers go down only, but for a new capability; the design wants no name twice."""
    assert sizes.lines_of("jaxmem") <= 27_500
    assert sizes.records("jaxmem") <= 150
    assert sizes.named_twice("jaxmem") == {}


def test_an_init_is_a_line_that_says_what_lives_there():
    for module in in_package("jaxmem") + in_package("experiments"):
        path = PATHS[module]
        if path.name == "__init__.py" and module not in ("jaxmem", "experiments.gpu_check"):
            assert len(tree_of(module).body) == 1, module
            assert ast.get_docstring(tree_of(module)), module


def test_public_names_are_few_and_marked_as_public():
    assert {"plan", "Plan", "tag", "remat_policy", "plans", "errors"} <= PUBLIC
    assert len(PUBLIC) <= 20
    assert [n for n in EXPORTED if n not in PUBLIC and not n.startswith("_")] == []


def test_no_package_bears_the_name_of_a_public_function():
    """`import jaxmem.plan` would put a module in the place of the function."""
    modules = {room(m) for m in in_package("jaxmem")}
    assert not modules & {"plan", "stack", "tag", "explain", "verify", "adama", "auto", "softmax"}


@pytest.mark.parametrize(
    ("source", "name", "top"),
    [
        ("import jax._src.core", "jax._src.core", True),
        ("import jax as j\nj.extend.core.Var", "jax.extend.core.Var", True),
        (
            "import jaxmem\ndef f(): return jaxmem._result.plan.plan.x",
            "jaxmem._result.plan.plan.x",
            False,
        ),
        ("if TYPE_CHECKING:\n import jax\nelse:\n import numpy", "jax", None),
        ("if TYPE_CHECKING:\n import jax\nelse:\n import numpy", "numpy", True),
    ],
)
def test_imports_are_found(source, name, top):
    assert Import(name, top) in imports(ast.parse(source))


@pytest.mark.parametrize(
    ("name", "is_private"),
    [
        ("jaxmem", False),
        ("jaxmem.codecs.parse", False),
        ("jaxmem._result.plan.plan", True),
        ("jaxmem.codecs._table", True),
        ("jaxmem.secret", True),
        ("jax._src", False),
    ],
)
def test_private_names_are_known(name, is_private):
    assert private(name) == is_private


# CIFAR's files are pickles; the reader there looks no name up.
UNPICKLES = {"experiments.data.cifar"}


def test_nothing_that_is_read_can_run():
    """No pickles, no evaluated text, no YAML: files of others may hold anything."""
    readers = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml")
    modules = in_package("jaxmem") + in_package("jaxmem_kernels") + in_package("experiments")
    others = [module for module in modules if module not in UNPICKLES]
    assert violations(others, lambda name: within(name, *readers)) == []
    for module in modules:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else ""
                assert name not in ("eval", "exec", "__import__"), f"{module}:{node.lineno}"
                pickled = [k for k in node.keywords if k.arg == "allow_pickle"]
                assert not any(getattr(k.value, "value", True) for k in pickled), module

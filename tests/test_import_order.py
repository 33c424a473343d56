"""The order of imports, which is the story of the package, and two limits of size."""

import ast
import functools
import graphlib
import pathlib
from collections.abc import Mapping

import pytest

import jax_ragrl

PACKAGE = "jax_ragrl"

# An entry is a module or a package. In a package siblings may import each other, but not in cycles.
ORDER = [
    *("version", "errors", "json_text", "types", "config", "runtime", "text", "corpus", "models"),
    *("retrieval", "sampling", "llm", "rollout", "credit", "losses", "learner", "systems", "run"),
    *("training", "warmstart", "evaluation", "report", "experiments", "serve", "export", "api"),
    *("plan", "validation", "bench", "cli"),
    "__main__",
]

# Walls: no file of the first package imports the second.
WALLS = [
    ("learner", "systems"),
    ("systems", "learner"),
    ("serve", "training"),
    ("evaluation", "training"),
]
FORBIDDEN = {"torch", "tensorflow"}


def read_package() -> dict[str, str]:
    """Dotted module name to source, for every file of the package; `a.__init__` is a package's."""
    root = pathlib.Path(jax_ragrl.__file__).parent
    return {
        ".".join((PACKAGE, *path.relative_to(root).with_suffix("").parts)): path.read_text()
        for path in root.rglob("*.py")
    }


@functools.cache
def imported_names(module: str, source: str) -> list[str]:
    """The absolute names that `module` imports, also in functions and for typing."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # One dot is the module's own package, each further dot one package up.
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def internal_imports(module: str, sources: Mapping[str, str]) -> set[str]:
    """The modules of the package that `module` imports; names inside a module are cut off."""
    found = set()
    for name in imported_names(module, sources[module]):
        if name.split(".")[0] == PACKAGE and (target := resolve(name, sources)):
            found.add(target)
    return found


def resolve(name: str, sources: Mapping[str, str]) -> str | None:
    """The longest prefix of `name` that is a module; None for the root (`__version__`)."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        prefix = ".".join(parts[:end])
        if prefix in sources:
            return prefix
        if f"{prefix}.__init__" in sources:
            return f"{prefix}.__init__"
    return None


def entry(module: str) -> str:
    return module.split(".")[1]


def order_violations(sources: Mapping[str, str]) -> list[str]:
    """One line for each import that points down the order, and for each entry that is not in it."""
    problems = []
    for module in sorted(sources):
        if entry(module) not in (*ORDER, "__init__"):
            problems.append(f"{module}: {entry(module)!r} has no place in the import order")
        for target in sorted(internal_imports(module, sources)):
            if rank(entry(target)) > rank(entry(module)):
                problems.append(f"{module} imports {target}, which stands below it")
    return problems


def rank(name: str) -> int:
    """The root's `__init__` is the public face and comes last; unknown entries count once."""
    return len(ORDER) if name == "__init__" else ORDER.index(name) if name in ORDER else -1


def cycles(sources: Mapping[str, str]) -> list[str]:
    """The first cycle of imports, as one line, or nothing."""
    graph = {module: internal_imports(module, sources) for module in sources}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def test_imports_follow_the_order_cross_no_wall_and_have_no_cycle():
    sources = read_package()
    assert order_violations(sources) == wall_violations(sources) == cycles(sources) == []


def wall_violations(sources: Mapping[str, str]) -> list[str]:
    """One line per import across one of `WALLS`."""
    return [
        f"{module} imports {target}, across the wall between {here} and {there}"
        for here, there in WALLS
        for module in sorted(sources)
        if entry(module) == here
        for target in sorted(internal_imports(module, sources))
        if entry(target) == there
    ]


def test_a_step_of_training_knows_neither_config_nor_components():
    sources, seen, todo = read_package(), set(), [f"{PACKAGE}.training.step"]
    while todo:
        if (module := todo.pop()) not in seen:
            seen.add(module)
            todo += internal_imports(module, sources)
    assert "run" not in map(entry, seen)


def test_the_package_imports_neither_torch_nor_tensorflow():
    sources = read_package()
    names = [(module, x) for module in sources for x in imported_names(module, sources[module])]
    assert not [(module, x) for module, x in names if x.split(".")[0] in FORBIDDEN]


# The checker itself, on packages that exist only here.

ABOVE = {"jax_ragrl.__init__": "", "jax_ragrl.losses": "", "jax_ragrl.text.__init__": ""}


FROM_BELOW = (
    "import jax_ragrl.losses",
    "from jax_ragrl import losses",
    "from ..losses import kl_penalty",
    "def late():\n    from jax_ragrl import losses",
    "if TYPE_CHECKING:\n    from jax_ragrl.losses import Loss",
)


def test_the_checkers_see_an_import_from_below_a_wall_a_file_without_a_place_and_a_cycle():
    for source in FROM_BELOW:
        found = order_violations({**ABOVE, "jax_ragrl.text.prompts": source})
        assert found == ["jax_ragrl.text.prompts imports jax_ragrl.losses, which stands below it"]
    sources = {"jax_ragrl.learner.a": "", "jax_ragrl.systems.b": "import jax_ragrl.learner.a"}
    assert len(wall_violations(sources)) == 1
    assert "'extras' has no place" in order_violations({"jax_ragrl.extras": ""})[0]
    sources = {f"jax_ragrl.text.{x}": f"from jax_ragrl.text import {y}" for x, y in ("ab", "ba")}
    assert len(cycles(sources)) == 1


LINES_OF_FUNCTION = 80  # from `def` to the end, without the docstring
LINES_OF_MODULE = 700


def long_functions(source: str) -> list[str]:
    """`name: lines` of each function with more than `LINES_OF_FUNCTION` lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node):
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            if lines > LINES_OF_FUNCTION:
                found.append(f"{node.name}: {lines}")
    return found


@pytest.mark.slow
def test_functions_and_modules_have_a_limited_length():
    too_long = {}
    for module, source in read_package().items():
        lines = len(source.splitlines())
        offences = long_functions(source) + [f"module: {lines}"] * (lines > LINES_OF_MODULE)
        if offences:
            too_long[module] = offences
    assert not too_long

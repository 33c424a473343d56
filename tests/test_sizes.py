"""Two limits of size; everything else about style is left to ruff and to readers."""

import ast
import pathlib

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "jax_ragrl"
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


def test_functions_and_modules_have_a_limited_length():
    too_long = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        lines = len(source.splitlines())
        offences = long_functions(source) + [f"module: {lines}"] * (lines > LINES_OF_MODULE)
        if offences:
            too_long[str(path.relative_to(PACKAGE))] = offences
    assert not too_long


def test_a_docstring_does_not_count():
    body = "".join(f"    x = {i}\n" for i in range(LINES_OF_FUNCTION - 1))
    docstring = '    """One.\n\n    Two.\n    """\n'
    assert not long_functions(f"def f():\n{docstring}{body}")
    assert long_functions(f"def f():\n{docstring}{body}    x = 0\n") == ["f: 81"]

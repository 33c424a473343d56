"""Measures the language and the structure of the repository; lists what breaks the style rules.

    python tests/style/measure.py [--json]
    python tests/style/measure.py --list KIND [PATH ...]

Texts are docstrings, comments and Markdown, plus strings of three words or more in the
package. Phrases are counted per 10,000 words of text. Patterns are heuristics: some matches are
correct English, so a budget need not reach zero.

Names are counted once per scope (module, class or function; comprehensions and lambdas belong to
the function around them): functions, classes, arguments, variables, `self` attributes and module
files. A name is a bare participle if each of its words is a past participle: `found`, `Told`, but
not `cached_rows` or `left_out`. Names with a leading underscore or an axis suffix (`_kept`,
`drawn_B`) count as names, but never as bare participles.

Function lengths count lines of code, with decorators and signature, without docstring and comments.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import itertools
import json
import pathlib
import re
import statistics
import tokenize
import tomllib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "jax_ragrl"
SELF = pathlib.Path("tests/style")  # quotes the phrases that it looks for

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef

WORDS = tomllib.loads(pathlib.Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
COUNT, UNIT, CONDITION = ("|".join(WORDS[key].split()) for key in ("counts", "units", "conditions"))
IDIOM = "|".join(WORDS["idioms"]).replace(" ", r"\s+")
PHRASES = {
    "per": rf"(?<![\w-])(?:{COUNT}|\d[\w.]*)\s+an?\s+(?:{UNIT})\b(?!-)",
    "where": rf"(?<![\w.`])where\s+(?:{CONDITION})\b",
    "what": r"\bwhat\s+(?:is|are|was|were|it|they|he|she|the|a|an|has|have)\b",
    "idiom": rf"(?<![\w-])(?:{IDIOM})(?![\w-])",
}
OPENINGS = {  # of a docstring; "Whether" is right for a bool
    "opening": re.compile(r"\s*(?:What|That)\b"),
    "pronoun": re.compile(r"\s*(?:Those|These|This|It|Its|They|Their|Such|Whose)\b"),
}

IRREGULAR = frozenset(WORDS["irregular"].split())
NOT_PARTICIPLES = frozenset(WORDS["regular_exceptions"].split())


class Text(NamedTuple):
    kind: str  # docstring, comment, message or page
    line: int
    words: str


class Offence(NamedTuple):
    file: pathlib.Path
    line: int
    text: str


def files() -> list[pathlib.Path]:
    """Python files and pages, relative to the root of the repository, without this folder's."""
    paths = [path for top in (PACKAGE, "tests", "configs") for path in (ROOT / top).rglob("*.py")]
    paths += [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    paths = [path for path in paths if "_build" not in path.parts]
    relative = sorted(path.relative_to(ROOT) for path in paths)
    return [path for path in relative if SELF not in path.parents]


def package_files() -> list[pathlib.Path]:
    return [path for path in files() if path.parts[0] == PACKAGE]


@functools.cache
def source(file: pathlib.Path) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@functools.cache
def nodes(file: pathlib.Path) -> list[Any]:
    return list(ast.walk(ast.parse(source(file))))


@functools.cache
def tokens(file: pathlib.Path) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(source(file)).readline))


@functools.cache
def texts(file: pathlib.Path) -> list[Text]:
    if file.suffix == ".md":
        return [Text("page", 1, source(file))]
    return [*_strings(file), *_comments(file)]


def _strings(file: pathlib.Path) -> Iterator[Text]:
    """Docstrings, of fields too, and messages of the package."""
    bodies = [node.body for node in nodes(file) if isinstance(getattr(node, "body", None), list)]
    statements = [statement for body in bodies for statement in body]
    docstrings = {id(node.value) for node in statements if isinstance(node, ast.Expr)}
    for node in nodes(file):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                yield Text("docstring", node.lineno, node.value)
            elif file.parts[0] == PACKAGE and len(node.value.split()) >= 3:
                yield Text("message", node.lineno, node.value)


def _comments(file: pathlib.Path) -> Iterator[Text]:
    """Comments on consecutive lines are one text, since phrases run over the end of a line."""
    lines = {t.start[0]: t.string.lstrip("#! ") for t in tokens(file) if t.type == tokenize.COMMENT}
    for line in sorted(lines.keys() - {line + 1 for line in lines}):
        block = itertools.takewhile(lines.__contains__, itertools.count(line))
        yield Text("comment", line, "\n".join(lines[n] for n in block))


def phrases(file: pathlib.Path, kind: str) -> Iterator[Offence]:
    """Matches of one of the patterns `PHRASES`, with the words around each."""
    for text in texts(file):
        for match in re.finditer(PHRASES[kind], text.words, re.IGNORECASE):
            line = text.line + text.words.count("\n", 0, match.start())
            around = text.words[max(match.start() - 40, 0) : match.end() + 30]
            yield Offence(file, line, f"[{match[0]}] ...{around}...")


def openings(file: pathlib.Path, kind: str) -> Iterator[Offence]:
    """Docstrings and, for pronouns, comments that begin with one of the patterns `OPENINGS`."""
    kinds = ("docstring", "comment") if kind == "pronoun" else ("docstring",)
    for text in texts(file):
        if text.kind in kinds and OPENINGS[kind].match(text.words):
            yield Offence(file, text.line, text.words[:90])


def is_participle(name: str) -> bool:
    """Whether each word of the name is a past participle."""
    words = [] if name.startswith("_") else re.split("_|(?<=[a-z])(?=[A-Z])", name)
    return bool(words) and all(_is_past(word.lower()) for word in words)


def _is_past(word: str) -> bool:
    is_regular = word.endswith("ed") and len(word) > 3 and word not in NOT_PARTICIPLES
    return is_regular or word in IRREGULAR


@functools.cache
def names(file: pathlib.Path) -> list[Offence]:
    """Every name at the line that binds it first, once per scope."""
    module = nodes(file)[0]
    first = {(module, file.stem): 1}

    def walk(node: ast.AST, scope: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if (name := _bound_name(child)) not in ("", "self", "cls"):
                first.setdefault((scope, name), getattr(child, "lineno", 1))
            walk(child, child if isinstance(child, Definition) else scope)

    walk(module, module)
    return [Offence(file, line, name) for (_, name), line in first.items()]


def _bound_name(node: ast.AST) -> str:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.ExceptHandler():
            return node.name or ""
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
            return name
        case ast.Attribute(attr=name, value=ast.Name(id="self"), ctx=ast.Store()):
            return name
    return ""


def participles(file: pathlib.Path) -> list[Offence]:
    return [name for name in names(file) if is_participle(name.text)]


def public_functions(body: Iterable[Any]) -> Iterator[Function]:
    """Public functions and methods of public classes, without nested functions."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield from public_functions(node.body) if isinstance(node, ast.ClassDef) else [node]


def parameters(function: Function) -> list[str]:
    args = function.args
    all_args = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return [arg.arg for arg in all_args if arg is not None and arg.arg not in ("self", "cls")]


def wide_functions(file: pathlib.Path) -> list[Function]:
    """Public functions with three or more parameters."""
    return [f for f in public_functions(nodes(file)[0].body) if len(parameters(f)) >= 3]


def undescribed(file: pathlib.Path) -> Iterator[Offence]:
    """Wide functions that leave two or more of their parameters undescribed."""
    for function in wide_functions(file):
        docstring = ast.get_docstring(function) or ""
        missing = [name for name in parameters(function) if not _describes(docstring, name)]
        if len(missing) > 1:
            yield Offence(file, function.lineno, f"{function.name}: {', '.join(missing)}")


def _describes(docstring: str, name: str) -> bool:
    """Whether the docstring has the parameter in backticks or as an entry of its `Args:`."""
    entry = re.compile(rf"^\s+[^:\n]*\b{name}\b[^:\n]*:", re.MULTILINE)
    return f"`{name}`" in docstring or bool(entry.search(docstring.partition("Args:")[2]))


@functools.cache
def code_lines(file: pathlib.Path) -> set[int]:
    layout = "COMMENT NL NEWLINE INDENT DEDENT ENDMARKER".split()
    code = [t for t in tokens(file) if tokenize.tok_name[t.type] not in layout]
    lines = {line for t in code for line in range(t.start[0], t.end[0] + 1)}
    docstrings = [text for text in texts(file) if text.kind == "docstring"]
    return lines - {text.line + n for text in docstrings for n in range(text.words.count("\n") + 1)}


@functools.cache
def lengths(file: pathlib.Path) -> list[tuple[int, Offence]]:
    """The number of lines of code of every function."""
    lengths = []
    for node in nodes(file):
        if isinstance(node, Function):
            start = min(part.lineno for part in (node, *node.decorator_list))
            length = len(code_lines(file) & {*range(start, (node.end_lineno or start) + 1)})
            lengths.append((length, Offence(file, node.lineno, f"{length} lines: {node.name}")))
    return lengths


def long_functions(file: pathlib.Path) -> list[Offence]:
    return [offence for length, offence in lengths(file) if length > 30]


def loose_modules(file: pathlib.Path) -> list[Offence]:
    is_loose = len(file.parts) == 2 and not file.stem.startswith("__")
    return [Offence(file, 1, "module outside a folder")] if is_loose else []


KINDS: dict[str, Callable[[pathlib.Path], Iterable[Offence]]] = {
    **{kind: functools.partial(phrases, kind=kind) for kind in PHRASES},
    **{kind: functools.partial(openings, kind=kind) for kind in OPENINGS},
    **{"participle": participles, "args": undescribed},
    **{"long": long_functions, "loose": loose_modules},
}
IN_PACKAGE = ("participle", "args", "long", "loose")  # the other kinds concern all texts


def offences(kind: str, paths: Iterable[str] = ()) -> list[Offence]:
    """Offences of a `kind`; `paths` limits them to files and folders, relative to the root."""
    limits = {pathlib.Path(path) for path in paths} or {pathlib.Path(".")}
    searched = package_files() if kind in IN_PACKAGE else files()
    searched = [file for file in searched if limits & {file, *file.parents}]
    return [offence for file in searched for offence in KINDS[kind](file)]


def measure() -> dict[str, float]:
    """Every number of the budget; shares are in percent, phrases per 10,000 words."""
    everything = [text.words for file in files() for text in texts(file)]
    words = sum(len(text.split()) for text in everything)
    package = package_files()
    sizes = [length for file in package for length, _ in lengths(file)]
    comments = sum(t.type == tokenize.COMMENT for file in package for t in tokens(file))
    wide = sum(len(wide_functions(file)) for file in package)
    totals = {kind: len(offences(kind)) for kind in KINDS}
    numbers = {
        "README": len(source(pathlib.Path("README.md")).split()),
        **{kind: 1e4 * totals[kind] / words for kind in (*PHRASES, *OPENINGS)},
        "participle": 100 * totals["participle"] / sum(len(names(file)) for file in package),
        "long": totals["long"],
        "loose": totals["loose"],
        "median length": statistics.median(sizes),
        "maximum length": max(sizes),
        "described": 100 * (1 - totals["args"] / wide),
        "comments": 100 * comments / sum(len(code_lines(file)) for file in package),
        "count of per": len(re.findall(r"\bper\b", "\n".join(everything), re.IGNORECASE)),
    }
    return {name: round(number, 1) for name, number in numbers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the style of the repository.")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--list", choices=KINDS, metavar="KIND", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("paths", nargs="*", help="files and folders that --list is limited to")
    options = parser.parse_args()
    if options.list:
        for file, line, text in offences(options.list, options.paths):
            print(f"{file}:{line}: {' '.join(text.split())}")
    elif options.json:
        print(json.dumps(measure(), indent=2))
    else:
        print("\n".join(f"{number:8g}  {name}" for name, number in measure().items()))


if __name__ == "__main__":
    main()

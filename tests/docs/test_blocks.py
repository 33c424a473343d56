"""Every fenced command and Python block of the pages runs, or says why a test does not run it."""

import os
import pathlib
import re
import subprocess
import sys

import commands as reference
import pytest

from jax_ragrl.cli import main as cli
from jax_ragrl.errors import UserError
from jax_ragrl.run.load import load_job
from jax_ragrl.run.overrides import load_config
from tests.docs.pages import PYTHON, ROOT, SHELL, Block, blocks, commands, pages
from tests.flags import flags

PAGES = pages()
SHELL_BLOCKS = [block for page in PAGES for block in blocks(page, SHELL)]
REASON = re.compile(r"not run: \S.{8,}")
BUILT = ("train", "config plan")  # commands whose whole config is on the command line


def relative(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: pathlib.Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def parsed(words: list[str]):
    """The arguments of a command of `ragrl`; fails with the message of its parser."""
    return cli._parse(words[1:])


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=lambda block: block.name)
def test_shell_blocks_parse_and_run_or_say_why_not(block: Block, capsys, tmp_path, monkeypatch):
    assert block.marker == "run" or REASON.fullmatch(block.marker), (
        "put <!-- run --> or <!-- not run: REASON --> on the line above the block"
    )
    if write_files(block, tmp_path):
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
    for words in commands(block.text):
        for name in files_of(words):
            assert (ROOT / name).exists(), f"{name} is not in the repository"
        if pathlib.Path(words[0]).name in ("ragrl", "ragrl.sh") and "..." not in words:
            try:
                arguments = parsed(words)
            except SystemExit as end:
                assert end.code == 0, f"{' '.join(words)}: {capsys.readouterr().err}"
            else:
                check_config(arguments)


def files_of(words: list[str]) -> list[str]:
    named = [word.removeprefix("--config=").partition(":")[0] for word in words]
    roots = ("configs/", "launch/", "./launch/", "notebooks/", "tests/", "docs/", "requirements/")
    return [name for name in named if name.startswith(roots) and "_build" not in name]


def check_config(arguments) -> None:
    changes = [a for a in arguments.config if a.startswith("--config.")]
    for change in changes:
        name = change.removeprefix("--config.").partition("=")[0]
        assert known_key(name), f"no config has the key {name}"
    branches = getattr(arguments, "start_from", "")
    if arguments.name not in BUILT or not arguments.config or branches:
        return
    try:
        load_job(load_config(None, arguments.config))
    except UserError as error:
        # Placeholders of a config that the text leaves out, and folders that are only examples.
        if "(set it with" not in str(error):
            raise


def known_key(name: str) -> bool:
    """Whether some config has a key, or a mapping that holds it."""
    from config_keys import all_names

    names = {re.sub(r"\[\w+\]", "", key) for key in all_names()}
    name = re.sub(r"\[\w+\]", "", name)
    parts = name.split(".")
    return name in names or any(".".join(parts[:i]) in MAPPINGS for i in range(1, len(parts)))


def test_the_path_of_a_question_names_functions_that_exist():
    text = (ROOT / "docs" / "reference" / "architecture.md").read_text(encoding="utf-8")
    steps = re.findall(r"^(\w+/\w+\.py) +(\w+)", text, re.MULTILINE)
    assert len(steps) > 10
    for file, name in steps:
        assert f"\ndef {name}(" in (ROOT / "jax_ragrl" / file).read_text(encoding="utf-8"), name


# Of other programs.
OTHERS = {"--num-slices", "--all", "--list", "--topk", "--count", "--toy"}
OTHERS |= {"--offline", "--strict-collection", "--secret", "--secrets"}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_commands_options_files_and_keys_that_a_page_names_exist(page: pathlib.Path):
    text = prose(page)
    spans = re.findall(r"`([^`\n]*)`", text)
    parsers = dict(reference.commands(reference.parser()))
    holders = {name.rpartition(" ")[0] for name in parsers if name.count(" ") == 2}
    actions = [action for p in parsers.values() for action in p._actions]
    known = {o for a in actions if reference.is_shown(a) for o in a.option_strings} | OTHERS
    scripts = "".join(file.read_text() for file in (ROOT / "docs" / "lab").glob("*.py"))
    known |= set(re.findall(r'"(--[a-z-]+)"', scripts))
    options = {o for span in spans for o in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}
    assert not {o for o in options if o not in known and not o.startswith("--config")}
    for span in spans:
        if span.startswith("ragrl "):
            command = " ".join(span.split()[: 3 if " ".join(span.split()[:2]) in holders else 2])
            assert command in parsers or command == "ragrl --help"
    # MyST leaves out a line that begins with `%`, as a line break before "% of" makes it.
    assert not re.findall(r"^%.*", text, re.MULTILINE)
    names = re.findall(r"`((?:\w+/)+\w+\.(?:py|sh|ipynb|svg|json))`", prose(page))
    names = [name for name in names if "NAME" not in name]  # a placeholder
    roots = (ROOT, ROOT / "jax_ragrl", ROOT / "jax_ragrl" / "systems")
    missing = sorted({n for n in names if not any((root / n).exists() for root in roots)})
    assert not missing
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"--config\.([\w.\[\]]*\w)(?==)", text)
    unknown = sorted({n for n in names if not known_key(n) and n not in ("a.b", "KEY")})
    assert not unknown, f"no config has these keys: {unknown}"


def test_the_overrides_of_algorithms_name_keys_that_exist():
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    keys = re.findall(r"`([\w.]+)=[^`\s]+`", text)
    assert len(keys) > 20 and not [key for key in keys if not known_key(key)]


MAPPINGS = ("llm.extra_body", "judge.extra_body", "data.files.fields")


def scripts() -> list:
    """The pages with Python blocks; those with a slow block are for a slow test."""
    params, slow_marks = [], [pytest.mark.slow, pytest.mark.optimized]
    for page in PAGES:
        markers = [block.marker for block in blocks(page, PYTHON)]
        slow = slow_marks if any(m.startswith("slow: ") for m in markers) else []
        if markers:
            params.append(pytest.param(page, marks=slow, id=relative(page)))
    return params


@pytest.mark.parametrize("page", scripts())
def test_python_blocks_run(page: pathlib.Path, tmp_path, monkeypatch):
    workplace(tmp_path, monkeypatch)
    one_shape(tmp_path / "configs")
    namespace: dict = {"__name__": "__main__"}
    for block in blocks(page, PYTHON):
        if block.marker and not block.marker.startswith(("slow: ", "file: ")):
            assert REASON.fullmatch(block.marker), f"{block.name}: say why it is not run"
            compile(block.text, block.name, "exec")
            continue
        code = "\n" * block.line + block.text
        exec(compile(code, ROOT / block.file, "exec"), namespace)


def one_shape(configs: pathlib.Path) -> None:
    """The config that the blocks train, with few programs to compile, replaces the shipped ones."""
    text = (ROOT / "configs" / "tiny" / "c3po.py").read_text()
    for shapes in ("(80, 144, 256)", "(112, 160, 256)", "(16, 64)"):
        assert shapes in text
        text = text.replace(shapes, "(16,)" if shapes == "(16, 64)" else "(256,)")
    configs.unlink()
    (configs / "tiny").mkdir(parents=True)
    (configs / "tiny" / "c3po.py").write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [block for block in SHELL_BLOCKS if block.marker == "run"], ids=lambda b: b.name
)
def test_marked_shell_blocks_run(block: Block, tmp_path, monkeypatch):
    workplace(tmp_path, monkeypatch)
    write_files(block, tmp_path)
    # The programs of these small runs take longer to compile than to compute.
    monkeypatch.setenv("XLA_FLAGS", flags(1))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    script = "set -euo pipefail\n" + re.sub(r"^\$ ", "", block.text, flags=re.MULTILINE)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def write_files(block: Block, folder: pathlib.Path) -> bool:
    """Writes the files that the page of a block shows; returns whether there are any."""
    markers = [other for other in blocks(ROOT / block.file, PYTHON) if "file: " in other.marker]
    for other in markers:
        (folder / other.marker.removeprefix("file: ")).write_text(other.text)
    return bool(markers)


def workplace(folder: pathlib.Path, monkeypatch) -> None:
    """A folder with the files of a checkout that pages name, and `ragrl` on the path."""
    for name in ("configs", "tests", "launch", "notebooks"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin").mkdir()
    command = folder / "bin" / "ragrl"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m jax_ragrl.cli.main "$@"\n')
    command.chmod(0o755)
    (folder / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(folder)

"""Statements of a release: one version everywhere, pinned installations, an image without root."""

import pathlib
import re

import pytest

import jax_ragrl
from jax_ragrl.run.overrides import load_config

ROOT = pathlib.Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_citation_and_changelog_have_the_version_of_the_package():
    """Before its release a version is the section of unreleased changes."""
    version = re.search(r"^version: (\S+)$", text_of("CITATION.cff"), re.MULTILINE)
    assert version is not None and version[1] == jax_ragrl.__version__
    headings = re.findall(r"^## \[(.+?)\]", text_of("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "Unreleased" or headings[0] == jax_ragrl.__version__


def test_the_image_does_not_run_as_root_and_its_base_is_pinned_by_digest():
    """A tag can be moved to another image, a digest cannot."""
    users = re.findall(r"^USER (\S+)$", text_of("launch/Dockerfile"), re.MULTILINE)
    assert users and users[-1] not in ("root", "0")
    bases = re.findall(r"^FROM (\S+)", text_of("launch/Dockerfile"), re.MULTILINE)
    assert bases and all(re.fullmatch(r"[\w./:-]+@sha256:[0-9a-f]{64}", base) for base in bases)


def test_the_image_has_no_file_that_git_ignores():
    lines = text_of("launch/Dockerfile.dockerignore").splitlines()
    excluded = {line.removeprefix("**/") for line in lines}
    assert set(text_of(".gitignore").splitlines()) <= excluded


def test_a_shipped_config_loads_from_any_folder(tmp_path, monkeypatch):
    """As from a wheel, which has the configs inside of the package."""
    monkeypatch.chdir(tmp_path)
    values = load_config(None, ["--config=configs/tiny/c3po.py:changed", "--config.run.steps=3"])
    assert values["run"]["steps"] == 3 and "outdated_relations" in values["data"]["world"]
    # A file of the working directory comes first.
    own = tmp_path / "configs" / "tiny" / "c3po.py"
    own.parent.mkdir(parents=True)
    own.write_text(
        "import ml_collections\ndef get_config():\n  return ml_collections.ConfigDict({'x': 1})\n"
    )
    assert load_config(None, ["--config=configs/tiny/c3po.py"]) == {"x": 1}


def installs(text: str) -> list[str]:
    """The installations by pip in a script, with continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    pip = re.compile(r"""(pip install|"\$\{pip\[@\]\}"|bin/pip" install) (.+)""")
    hits = (pip.search(line) for line in lines if not line.lstrip().startswith("#"))
    return [hit[2].strip() for hit in hits if hit is not None]


# What cannot have one hash: torch, whose builds for a CPU and a GPU share one version, and the
# wheel that the workflow has just built, which is installed as users install it.
UNHASHED = (r"^torch==\d[\d.]*\d$", r"^dist/\*\.whl$")


@pytest.mark.parametrize("file", [ROOT / ".ci" / "run", *WORKFLOWS], ids=lambda file: file.name)
def test_every_installation_is_pinned_by_hash(file):
    """A version on an index can be replaced, the file of a hash cannot."""
    commands = installs(file.read_text(encoding="utf-8").replace("--quiet ", ""))
    for command in commands:
        if "--disable-pip-version-check" in command:
            continue  # the definition of the command, without packages
        hashed = "--require-hashes" in command
        assert hashed or any(re.match(form, command) for form in UNHASHED), command
    assert commands or file.name in ("docs.yml", "tests.yml")


LOCKS = ["release", "references", "real", "test", "integrations", "inspect"]


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_a_lock_has_a_hash(name):
    packages = re.split(r"^(?=[\w.-]+==)", text_of(f"requirements/{name}.lock"), flags=re.M)[1:]
    assert packages and all("--hash=sha256:" in package for package in packages)


def test_the_checks_use_the_models_that_users_install_and_the_sbom_a_lock_that_exists():
    pins = [re.findall(r"^\S+==\S+", text_of(f"requirements/{x}.lock"), re.M) for x in NAMES]
    assert pins[0] and set(pins[0]) <= set(pins[1])
    lock = re.search(r"cyclonedx-py requirements (\S+)", text_of(".github/workflows/release.yml"))
    assert lock is not None and (ROOT / lock[1]).is_file()


NAMES = ("real", "references")

"""Each kind of fault that a system can give has a sentence, which the glossary has."""

import ast
import pathlib
import re

from jax_ragrl.rollout.fault_kinds import FAULTS, explain, explain_all
from jax_ragrl.rollout.pending import TOO_LONG
from jax_ragrl.rollout.roles import UNCLOSED_THOUGHT
from jax_ragrl.rollout.tree import LIMITS

ROOT = pathlib.Path(__file__).parents[2]
# "Max Depth", "No Sub-Answer", "answered, Out Of Turns": words with capitals.
KIND = re.compile(r"(answered, )?[A-Z][a-z]+(-[A-Z][a-z]+)?( ([A-Z][A-Za-z-]+|of))+")
# Names of actions and strategies, which are no faults.
ACTIONS = {"No Retrieval", "No Answer Needed"}


def kinds_in(path: pathlib.Path) -> set[str]:
    """The texts of a module that look like kinds of faults, except docstrings."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    texts = {n.value for n in ast.walk(module) if isinstance(n, ast.Constant)}
    kinds = {text for text in texts if isinstance(text, str) and KIND.fullmatch(text)}
    return {kind.removeprefix("answered, ") for kind in kinds} - ACTIONS


def test_every_kind_of_the_systems_has_a_sentence():
    files = [path for path in (ROOT / "jax_ragrl" / "systems").rglob("*.py")]
    kinds = set().union(*map(kinds_in, files)) | {TOO_LONG, UNCLOSED_THOUGHT, *LIMITS}
    assert len(kinds) > 35
    assert kinds == set(FAULTS)


def test_a_finish_reason_with_an_answer_is_explained_too():
    assert explain("answered, Out Of Turns") == FAULTS["Out Of Turns"]
    assert explain("answered") == explain("The server said no") == ""
    assert list(explain_all(["No Plan", "answered", "Max Depth", "No Plan"])) == [
        "Max Depth",
        "No Plan",
    ]

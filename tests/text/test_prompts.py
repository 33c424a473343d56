"""Prompt templates are files of a style, in the package or in another folder."""

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.text.prompts import format_passages, parse_passages, template, user_turn
from jax_ragrl.types import Message, Passage


def test_a_style_with_a_slash_is_a_path(tmp_path):
    style = str(tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "plan.txt").write_text("Plan $question\r\n", encoding="utf-8-sig")
    (tmp_path / "mine" / "document.txt").write_text("$number $title: ${text} $$\n")
    assert user_turn(style, "plan", question="$x?") == (Message("user", "Plan $x?"),)
    assert format_passages(style, [Passage("i", "t", "b")]) == "1 t: b $"
    assert parse_passages(style, "Read\n1 t: b $") == [("t", "b")]
    (tmp_path / "brief").mkdir()
    (tmp_path / "brief" / "plan.txt").write_text("Plan $question\n")
    (tmp_path / "brief" / "system.txt").write_text("Be brief.\n")
    turns = user_turn(str(tmp_path / "brief"), "plan", question="q")
    assert turns == (Message("system", "Be brief."), Message("user", "Plan q"))
    with pytest.raises(UserError, match="mine/other.txt"):
        template(style, "other")
    assert template("c3po_tiny", "document").template
    wrong = (("Plan for $5", "line 1, col 10"), ("$query", "'query'"), ("Plan", "no placeholder"))
    for text, cause in wrong:
        (tmp_path / "mine" / f"{len(text)}.txt").write_text(text)
        with pytest.raises(UserError, match=rf"{len(text)}.txt cannot.*{cause}.*have \$question"):
            user_turn(style, f"{len(text)}", question="q")
    for data, cause in ((b" \n", "is empty"), (b"caf\xe9 $question", "is not UTF-8")):
        (tmp_path / "mine" / f"{len(data)}.txt").write_bytes(data)
        with pytest.raises(UserError, match=rf"{len(data)}.txt {cause}"):
            user_turn(style, f"{len(data)}", question="q")


@pytest.mark.parametrize("name", ["answer", "answer_direct", "document"])
@pytest.mark.parametrize(
    ("one", "other"),
    [("c3po_real", "mao_arag_real"), ("baselines", "c3po"), ("baselines_tiny", "c3po_tiny")],
)
def test_systems_that_are_compared_ask_their_reader_alike(one, other, name):
    """They share recorded replies, whose requests must be equal to the letter."""
    assert template(one, name).template == template(other, name).template

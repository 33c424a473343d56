"""The example files of the page about own data are read as the page says."""

import re

import pytest

from jax_ragrl.corpus import formats
from tests.docs.pages import ROOT

TEXT = (ROOT / "docs" / "howto" / "own_data.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(
    r"^(Questions|Passages) as [^\n]*:\n\n```(?:text|json)\n(.*?)```", TEXT, re.S | re.M
)


@pytest.mark.parametrize(("content", "example"), EXAMPLES)
def test_an_example_has_five_records(tmp_path, content, example):
    path = tmp_path / "data"
    path.write_text(example, encoding="utf-8")
    if content == "Passages":
        passages = formats.load_passages(path)
        assert len(passages) == 5 and "Stoker" in passages[0].text
        return
    questions = formats.load_questions(path)
    assert [q.text[:3] for q in questions] == ["Who", "Whe", "Whe", "Who", "In "]
    assert questions[1].answers == ("Clontarf", "Dublin")


def test_every_form_has_an_example():
    assert len(EXAMPLES) == 3

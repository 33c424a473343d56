"""Secrets and control characters of other programs are not in errors, configs or the terminal."""

import json
import warnings

import pytest

from jax_ragrl.cli import main
from jax_ragrl.cli.common import show
from jax_ragrl.config.snapshot import load_saved_config, save_config
from jax_ragrl.errors import EffectError, UserError, printable, redacted, safe_line
from jax_ragrl.llm.openai import OpenAILLM
from jax_ragrl.retrieval.remote import RemoteRetriever
from jax_ragrl.retrieval.web import WebRetriever
from tests.faults import sending, whole
from tests.runtime.test_servers import ask

KEY = "sk-canary-0123456789"
ATTACK = "\x1b]0;owned\x07\x9b31m\u202e\nragrl: everything is fine"


@pytest.mark.parametrize(
    "text, hidden",
    [
        ("http://ann:pa:ss@host:1/v1 failed", "http://***@host:1/v1 failed"),
        ("at https://token@host/x@y and http://b:c@d", "at https://***@host/x@y and http://***@d"),
        ("http://ann:p@ss@host", "http://***@host"),
        ("http://host:1/v1?a=b@c", "http://host:1/v1?a=b@c"),
        ("openai:m@http://host", "openai:m@http://host"),
        ("hf://datasets/a/b@main/c", "hf://datasets/a/b@main/c"),
    ],
)
def test_addresses_lose_their_credentials(text, hidden):
    assert redacted(text) == safe_line(text) == hidden == redacted(hidden)


def test_no_control_character_is_in_an_error_nor_a_key_of_the_environment(monkeypatch):
    line = safe_line(ATTACK)
    assert line == r"\x1b]0;owned\x07\x9b31m\u202e ragrl: everything is fine"
    assert str(UserError(ATTACK)) == str(EffectError(ATTACK)) == line
    assert printable("a\tb\n\x1b[31m\r") == "a\tb\n\\x1b[31m\\r"
    monkeypatch.setenv("SOME_API_KEY", f" {KEY}\n")
    monkeypatch.setenv("OTHER_TOKEN", "none")
    assert redacted(f"Bearer {KEY}, none") == "Bearer ***, none"


@pytest.mark.parametrize("client", ["llm", "retriever"])
def test_an_echo_of_the_key_is_hidden_in_the_failure(client, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    body = f"wrong key {KEY} {ATTACK}".encode()
    with sending(lambda number: [whole(body, "500 Wrong")]) as (address, _):
        address = address.replace("http://", "http://ann:secret@")
        error = ask(client, address, retries=0)
    assert isinstance(error, EffectError) and "wrong key ***" in str(error)
    for text in (KEY, "ann", "secret", "\x1b", "\x9b", "\n"):
        assert text not in str(error)


def test_no_fingerprint_has_credentials(monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    retriever = RemoteRetriever("http://ann:secret@host:1/retrieve")
    assert retriever.fingerprint == "http://***@host:1"
    assert WebRetriever("serper", "http://ann:secret@host").fingerprint == "http://***@host"


def test_a_saved_config_has_no_credentials_and_resumes(tmp_path):
    address = "http://ann:secret@host/v1"
    values = {"llm": {"kind": "openai", "model": "m", "base_url": address}, "seed": (1, address)}
    for _ in range(2):
        save_config(tmp_path / "config.json", values)
    assert "secret" not in (tmp_path / "config.json").read_text()
    saved = load_saved_config(tmp_path / "config.json")
    assert saved["llm"]["base_url"] == saved["seed"][1] == "http://***@host/v1"
    with pytest.raises(UserError, match="give the whole address again"):
        OpenAILLM("m", saved["llm"]["base_url"])
    with pytest.raises(UserError, match="give the whole address again"):
        RemoteRetriever(saved["llm"]["base_url"])


def test_a_terminal_gets_no_control_characters(capsys, monkeypatch):
    show(ATTACK)
    monkeypatch.setattr(warnings, "formatwarning", main._format_warning)
    assert main._report_error(ATTACK) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[1] == "ragrl: everything is fine" and "\x1b" not in out + err
    assert len(err.splitlines()) == 1
    text = main._format_warning(ATTACK, UserWarning, main.__file__, 1)
    assert text.count("\n") == 1 and "\x1b" not in text and json.dumps(text)

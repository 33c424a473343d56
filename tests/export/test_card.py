"""The model card: front matter for the Hub, and the facts of the run."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from jax_ragrl.errors import UserError
from jax_ragrl.export.card import (
    SMOLLM2_NAME,
    Base,
    CardFacts,
    base_model,
    card_text,
    data_label,
    front_matter,
    result_lines,
)
from jax_ragrl.models import by_name
from jax_ragrl.run.load import load_job
from tests.jobs import config_values

FILES = {
    "train": "hf://datasets/owner/nq@v1/train.jsonl,/home/me/hotpotqa/train.jsonl",
    "dev": "/home/me/hotpotqa/dev.jsonl",
    "test": "hf://datasets/owner/nq@v1/test.jsonl",
    "corpus": "/home/me/wiki.jsonl",
}
SUMMARY = {
    "steps": 28,
    "questions": 400,
    "metric": "F1, percent",
    "accuracy": {"direct": 30.0, "standard_rag": 40.04, "warm_start": 45.0, "trained": 51.5},
    "gain": {"over": "warm_start", "mean": 6.5, "ci95": [4.25, 8.75], "pairs": 399},
}
BASE = Base("owner/base", "owner/base", {"license": "mit"})


def facts(base: Base = BASE, **fields: Any) -> CardFacts:
    values = config_values("tiny/c3po")
    values |= fields.pop("values", {})
    given = {
        "job": load_job(copy.deepcopy(values)),
        "values": values,
        "policy": "policy",
        "base": base,
        "steps": 28,
        "result": ["A result."],
        "adapter": False,
        "name": "owner/policy",
    }
    return CardFacts(**given | fields)


def test_the_front_matter_has_the_keys_that_the_hub_reads():
    data = {"data": {"files": FILES}}
    head = yaml.safe_load(front_matter(facts(values=data)))
    assert head == {
        "base_model": "owner/base",
        "datasets": ["owner/nq"],
        "library_name": "transformers",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["jax_ragrl", "retrieval-augmented-generation", "reinforcement-learning", "c3po"],
    }
    assert yaml.safe_load(front_matter(facts(adapter=True)))["library_name"] == "peft"
    unknown = facts(Base("my-folder"))
    assert not {"base_model", "license", "datasets"} & yaml.safe_load(front_matter(unknown)).keys()
    assert "its card was not available" in card_text(unknown)
    assert ModelCard(card_text(facts())).data.license == "mit"  # as the Hub reads it


def test_data_are_named_without_paths_of_the_machine_and_addresses_of_servers():
    label = data_label({"data": {"files": FILES}})
    nq = "hf://datasets/owner/nq@v1"
    assert label == f"{nq}/train.jsonl, train.jsonl, dev.jsonl, {nq}/test.jsonl, wiki.jsonl"
    written = {"train": "nq:train", "test": "my/test.csv", "corpus": "../me/pages"}
    assert data_label({"data": {"files": written}}) == "nq:train, my/test.csv, pages"
    servers = {
        "index": {"kind": "remote", "url": "http://10.0.0.1:8000"},
        "llm": {"kind": "openai", "model": "Qwen/Qwen3-8B", "base_url": "http://10.0.0.1:9000"},
        "judge": {"kind": "local", "model": "/home/me/judge"},
    }
    text = card_text(facts(values=servers))
    assert "10.0.0.1" not in text and "/home" not in text
    assert "Qwen/Qwen3-8B" in text and "| judge of the reward | judge |" in text


@pytest.mark.parametrize(
    "index, text",
    [
        ({"kind": "bm25", "language": "german"}, "BM25 (language german)"),
        ({"kind": "exact", "encoder": "hashed"}, "exact search, encoder hashed"),
        ({"kind": "remote", "url": "http://host:1"}, "server of kind remote"),
        (
            {"kind": "pipeline", "retrievers": ("bm25", "minilm"), "rerank": "/home/me/x"},
            "reciprocal rank fusion of BM25 (language english); scann search, encoder minilm; "
            "reranked by x",
        ),
        (
            {"kind": "pipeline", "retrievers": ("bm25",), "rerank": "llm"},
            "BM25 (language english); reranked by the frozen model",
        ),
    ],
)
def test_the_retriever_is_the_one_of_the_run(index, text):
    assert f"| retriever | {text} |" in card_text(facts(values={"index": index}))


def test_files_without_a_section_index_are_searched_with_bm25():
    values = config_values("tiny/c3po") | {"data": {"files": FILES}}
    del values["index"]
    job = load_job(copy.deepcopy(values))
    card = card_text(dataclasses.replace(facts(), job=job, values=values))
    assert "| retriever | BM25 (language english) |" in card


def test_an_adapter_loads_on_its_base_and_not_on_what_that_derives_from(tmp_path):
    text = card_text(facts(adapter=True))
    assert 'PeftModel.from_pretrained(base, "owner/policy")' in text
    assert 'from_pretrained("owner/base")' in text
    (tmp_path / "README.md").write_text("---\nbase_model: owner/base\n---\ntext")
    text = card_text(facts(base_model(str(tmp_path), tmp_path), adapter=True))
    assert 'from_pretrained("FOLDER OF THE BASE MODEL")' in text
    assert yaml.safe_load(text.split("---")[1])["base_model"] == "owner/base"


def warm_start(out, policy):
    (out / "checkpoint").mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({"policy": policy}))
    return str(out / "checkpoint")


def test_a_warm_start_is_followed_to_the_model_that_it_started_from(tmp_path, monkeypatch):
    monkeypatch.setattr(by_name, "_smollm2", lambda: tmp_path)
    first = warm_start(tmp_path / "warm", "smollm2")
    second = warm_start(tmp_path / "again", first)
    for model in (first, second):
        base = base_model(model, Path(model))
        text = card_text(facts(base, adapter=True))
        assert f"| started from | {SMOLLM2_NAME}, after a warm start |" in text
        assert f"`apache-2.0`, that of {SMOLLM2_NAME}, after a warm start, from" in text
        assert yaml.safe_load(text.split("---")[1])["base_model"] == SMOLLM2_NAME
        # An adapter belongs on the weights of the warm start, which have no public name.
        assert 'from_pretrained("FOLDER OF THE BASE MODEL")' in text
    new = warm_start(tmp_path / "new", "")
    assert base_model(new, Path(new)).label == "a new model, after a warm start"
    moved = warm_start(tmp_path / "moved", "nowhere/at/all")
    assert base_model(moved, Path(moved)) == Base("checkpoint")


def test_the_license_of_a_base_comes_from_its_card(tmp_path):
    (tmp_path / "README.md").write_text(
        "---\nlicense: other\nlicense_name: qwen-research\nlicense_link: LICENSE\n---\ntext"
    )
    base = base_model("Qwen/Qwen2.5-3B@main", tmp_path)
    assert base.hub_name == "Qwen/Qwen2.5-3B" and base.label == "Qwen/Qwen2.5-3B@main"
    assert base.license["license_name"] == "qwen-research"
    assert base_model(str(tmp_path), tmp_path) == Base(tmp_path.name, "", base.license)
    assert base_model("tiny", tmp_path).license == {"license": "apache-2.0"}


@pytest.mark.parametrize("text", [None, "no front matter", "---\n[\n---\n", "---\n- 1\n---\n"])
def test_a_base_without_a_readable_card_has_no_license(text, tmp_path):
    if text is not None:
        (tmp_path / "README.md").write_text(text)
    assert base_model("owner/base", tmp_path) == Base("owner/base", "owner/base")


def test_the_result_is_the_paired_comparison_of_the_summary_unless_that_is_damaged(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    text = "\n".join(result_lines(tmp_path))
    assert "F1 on 400 held-out questions after 28 training steps" in text
    assert "| this system after training | 51.5 |" in text
    assert "6.5 points, 95 % interval 4.2 to 8.8 (bootstrap over 399 paired questions)" in text
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(UserError, match="is not the summary of a run .*: delete it"):
        result_lines(tmp_path)


def test_without_a_summary_the_newest_development_score_is_the_result(tmp_path):
    """Also a score of zero."""
    assert result_lines(tmp_path) == ["This run was not evaluated."]
    rows = [{"step": 7, "eval/accuracy": 0.25}, {"step": 14, "eval/accuracy": 0.0}, {"step": 15}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (line,) = result_lines(tmp_path)
    assert line.startswith("0.0 % on development questions after step 14")


def test_a_checkpoint_has_the_result_of_its_own_step(tmp_path):
    rows = [{"step": 10, "eval/accuracy": 0.63}, {"step": 20, "eval/accuracy": 0.5}, {"step": 28}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    (line,) = result_lines(tmp_path, 10)
    assert line.startswith("63.0 % on development questions after step 10")
    assert result_lines(tmp_path, 15) == ["This checkpoint was not evaluated."]
    assert result_lines(tmp_path, 28) == result_lines(tmp_path)

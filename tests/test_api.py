"""The public interface: its names, its import, a run from ten lines, the minimal example."""

import json

import numpy as np
import pytest

import jax_ragrl as rag
from examples import minimal
from jax_ragrl import api
from jax_ragrl.run.load import load_job
from jax_ragrl.types import Hits, Passage
from tests.chaos.runs import CONFIG, SMALL
from tests.tiny import saved_policy

# The names that users import: removing one breaks their code.
NAMES = {
    *("Answer", "CallLLM", "Done", "Forest", "FrozenLLM", "Generate", "Hits", "Message"),
    *("ParsedAction", "Passage", "Question", "Recipe", "Result", "Retriever", "Role", "Sampling"),
    *("Search", "State", "System", "TrainedRun", "UserError", "ask", "evaluate", "load_config"),
    *("open_run", "train"),
}


def test_the_public_names_are_stable():
    assert set(rag.__all__) == NAMES
    assert all(getattr(rag, name) is not None for name in NAMES)
    assert set(dir(rag)) >= NAMES
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        rag.trian  # noqa: B018


def test_own_questions_have_different_ids(tmp_path):
    questions = {"train": [rag.Question("1", "a?", ("x",)), rag.Question("1", "b?", ("x",))]}
    config = rag.load_config(CONFIG, {"run.steps": 0})
    with pytest.raises(rag.UserError, match=r"questions\['train'\]: two .*'a\?' and 'b\?'"):
        rag.train(config, tmp_path / "run", questions=questions)


class OnePassage:
    """A retriever of one's own: every query finds the same passage."""

    fingerprint = "one passage"

    def __init__(self):
        self.queries = []

    def search(self, queries, k):
        self.queries += queries
        return [Hits((Passage("p", "Ulm", "Ann was born in Ulm."),), (1.0,)) for _ in queries]


@pytest.mark.slow
def test_a_run_uses_its_own_reward_and_retriever(tmp_path):
    answers, retriever = [], OnePassage()

    def reward(question, answer):
        answers.append((question.text, answer))
        return 0.25

    changes = {**SMALL, "run.steps": 1, "policy": saved_policy(tmp_path)}
    config, folder = rag.load_config(CONFIG, changes), tmp_path / "run"
    run = rag.train(config, folder, reward=reward, retriever=retriever)
    assert answers and retriever.queries
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < row["reward/mean"] <= 0.25  # leaves without an answer have 0
    result = rag.evaluate(run, run.questions["test"][:2])
    assert len(result.answers) == 2 and "f1" in result.summary()
    again = rag.open_run(folder, retriever=retriever)
    question = run.questions["test"][0].text
    assert rag.ask(again, question) == rag.ask(run, question)
    assert question in rag.ask(run, question).transcript


def test_a_reward_replaces_the_terms_of_the_former_one_or_is_refused(tmp_path):
    config = rag.load_config("configs/tiny/opera.py", {"policy": "tiny"})
    with pytest.raises(rag.UserError, match="roles of this system learn from their own rewards"):
        rag.train(config, tmp_path, reward=lambda question, answer: 1.0)
    recipe = load_job(rag.load_config("configs/tiny/coda.py", {})).recipe
    assert recipe.reward_terms is not None
    assert api._with_reward(recipe, lambda question, answer: 1.0).reward_terms is None


def test_a_run_without_steps_answers_with_its_untrained_policies(tmp_path):
    config = rag.load_config(CONFIG, {**SMALL, "run.steps": 0, "policy": saved_policy(tmp_path)})
    run = rag.train(config, tmp_path / "run")
    question = run.questions["dev"][0].text
    assert rag.ask(run, question).transcript.startswith(question)
    for text in (" ", "Who \udcff is?"):  # a byte of a command line in Latin-1
        with pytest.raises(rag.UserError, match="is blank or no Unicode"):
            rag.ask(run, text)


def test_the_minimal_example_trains(capsys):
    rewards = minimal.main(steps=2, questions_per_step=4)
    assert len(rewards) == 2 and np.isfinite(rewards).all()
    assert capsys.readouterr().out.count("reward") == 2

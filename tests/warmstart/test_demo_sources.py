"""What rollouts teach the classifiers of baselines, and `ragrl demos --of`."""

from __future__ import annotations

import pytest

from jax_ragrl.cli.main import CONFIGS, main
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.registry import SYSTEMS, Bench
from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching, once
from jax_ragrl.systems.ablation import with_own_policies
from jax_ragrl.systems.c3po import C3PO, Settings, TreeShape, recipe
from jax_ragrl.systems.opera import system as opera
from jax_ragrl.systems.opera.grammar import PLAN
from jax_ragrl.systems.opera.mapgrpo import Injection
from jax_ragrl.types import Message
from jax_ragrl.warmstart.demo_sources import BASELINES, lesson_of
from jax_ragrl.warmstart.demos import Demo, load_demos
from tests.rollout.tape import ANN, BOB, Tape

TINY = recipe(Settings(C3PO("c3po_tiny", 2), TreeShape(1, retrieval="text")))


class Breaking(Tape):
    """A writer that fails at what a role writes about Bob."""

    failing = ""

    def _actions(self, request):
        actions = super()._actions(request)
        if request.role.name == self.failing and BOB.text in request.messages[-1].content:
            return [action._replace(text="", error="down") for action in actions]
        return actions


def write(role, prompt, rng):
    replies = {"decision": "Thought: t\nAction: [LLM]", "filter": "Thought: t\nAction: [1]"}
    return replies.get(role, "Ulm, I think")


def taught(of: str, failing: str = "", samples: int = 1, used=TINY) -> list[Demo]:
    lesson, tape = lesson_of(used, of), Breaking(write, told={"answer_direct": "Rom or so"})
    tape.failing = failing
    environment = tape.environment()
    forest = collect(lesson.system, lesson.expander, [ANN, BOB], environment, rollouts=samples)
    return lesson.demos(forest, {})


@pytest.mark.parametrize("style", ["tiny", "full"])
@pytest.mark.parametrize("of", BASELINES)
def test_a_row_has_the_prompt_that_a_table_of_its_style_shows(of, style):
    c3po = C3PO("c3po_tiny" if style == "tiny" else "c3po", 2)
    rows = taught(of, used=recipe(Settings(c3po)))
    tape = Tape(lambda role, prompt, rng: "A" if role == "gate" else write(role, prompt, rng))
    environment = tape.environment()
    collect(SYSTEMS[of](Bench(style, 2, environment, tape, ())), once, [ANN, BOB], environment)
    assert [row.question for row in rows] == ["q-ann", "q-bob"]
    assert {row.prompt[-1].content for row in rows} <= set(tape.prompts)


def test_a_class_is_the_cheapest_strategy_that_answers():
    # Without documents the answer is Rom, which is right for Bob; with them Ulm, which is for Ann.
    rows = [(row.question, row.role, row.reply) for row in taught("adaptive_rag")]
    assert rows == [("q-ann", "classifier", "B"), ("q-bob", "classifier", "A")]


def test_roles_with_policies_of_their_own_teach_the_same():
    apart = with_own_policies(TINY, ["router"])
    assert taught("adaptive_rag", used=apart) == taught("adaptive_rag")


@pytest.mark.parametrize(("of", "role"), [("adaptive_rag", "filter"), ("slim_plm", "drafter")])
def test_a_question_about_which_the_writer_failed_gives_no_row(of, role):
    assert [row.question for row in taught(of, failing=role)] == ["q-ann"]


def test_what_is_drafted_twice_is_one_row():
    (first, second) = taught("slim_plm", samples=3)
    prompt = (Message("user", f"gate A B\nQuestion: {ANN.text}\nDraft: Ulm, I think"),)
    assert first == Demo("q-ann", "gate", prompt, "A") and second.reply == "B"


def test_a_writer_is_compared_with_nobody():
    """Groups are for roles in training: a demonstration needs one rollout."""
    compared = opera.recipe(opera.Settings(group=3, expert=Injection("off")))
    effect = Generate(PLAN, (Message("user", "who"),))
    assert compared.expander(frozenset((PLAN,)))(effect, "who").samples == 3
    assert lesson_of(compared).expander(effect, "who") == Branching(1)


def test_a_tree_without_all_three_strategies_is_refused():
    sampled = recipe(Settings(tree=TreeShape(retrieval="sampled")))
    with pytest.raises(UserError, match=r"does not force \[No Retrieval\]"):
        lesson_of(sampled, "adaptive_rag")
    lesson_of(sampled, "slim_plm")  # which rolls nothing of C-3PO out


@pytest.mark.parametrize(
    ("config", "given", "told"),
    [
        ("mmoa_rag", ["--of=adaptive_rag", "--writer=tiny"], "this config has another system"),
        ("mmoa_rag", ["--of=slim_plm", "--writer=labels"], "name a model, for --of slim_plm"),
        ("c3po", ["--of=skr_knn", "--writer=tiny"], "use one of adaptive_rag, slim_plm"),
    ],
)
def test_a_wrong_choice_is_a_line_before_anything_is_made(config, given, told, tmp_path, capsys):
    file, out = CONFIGS / "tiny" / f"{config}.py", tmp_path / "made" / "d.jsonl"
    assert main(["demos", f"--config={file}", f"--out={out}", *given]) == 2
    assert told in capsys.readouterr().err and not out.parent.exists()


def test_the_command_goes_on_and_another_choice_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jax_ragrl.warmstart.make_demos.load_llm", lambda *given: Tape(write))
    config, out = CONFIGS / "tiny" / "mmoa_rag.py", tmp_path / "d.jsonl"
    given = [f"--config={config}", f"--out={out}", "--config.data.world.size=40", "--writer=tiny"]
    for limit in (2, 3):
        assert main(["demos", *given, "--of=slim_plm", f"--limit={limit}"]) == 0
        assert [(d.question, d.role) for d in load_demos(out)] == [
            (f"train-0000{i}", "gate") for i in range(limit)
        ]
    assert main(["demos", *given, "--limit=3"]) == 2
    assert "config.of differs" in capsys.readouterr().err

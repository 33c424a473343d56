"""Demonstrations for the classifiers of baselines, and `ragrl warmup demos --of`."""

import pytest

from jax_ragrl.cli.main import CONFIGS, main
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.registry import SYSTEMS, BuildContext
from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching, single_chain
from jax_ragrl.systems import opera
from jax_ragrl.systems.ablation import with_own_policies
from jax_ragrl.systems.c3po import C3PO, Settings, TreeShape, recipe
from jax_ragrl.systems.opera.grammar import PLAN
from jax_ragrl.systems.opera.mapgrpo import Injection
from jax_ragrl.types import Message
from jax_ragrl.warmstart.demo_sources import BASELINES, demo_source
from jax_ragrl.warmstart.demos import Demo, load_demos
from tests.rollout.tape import ANN, BOB, Tape

TINY = recipe(Settings(C3PO("c3po_tiny", 2), TreeShape(1, router_forcing="text")))


SMALL = "--config.data.world.size=40"


class Breaking(Tape):
    """A writer that fails on one role of the question about Bob."""

    failing = ""

    def _actions(self, request):
        actions = super()._actions(request)
        if request.role.name == self.failing and BOB.text in request.messages[-1].content:
            return [action._replace(text="", error="down") for action in actions]
        return actions


def write(role, prompt, rng):
    replies = {"decision": "Thought: t\nAction: [LLM]", "filter": "Thought: t\nAction: [1]"}
    return replies.get(role, "Ulm, I think")


def demos_for(of: str, failing: str = "", samples: int = 1, system_recipe=TINY) -> list[Demo]:
    source, tape = (
        demo_source(system_recipe, of),
        Breaking(write, replies={"answer_direct": "Rom or so"}),
    )
    tape.failing = failing
    environment = tape.environment()
    forest = collect(source.system, source.expander, [ANN, BOB], environment, rollouts=samples)
    return source.demos(forest, {})


@pytest.mark.parametrize("style", ["tiny", "full"])
@pytest.mark.parametrize("of", BASELINES)
def test_demonstrations_have_the_prompts_of_evaluation(of, style):
    c3po = C3PO("c3po_tiny" if style == "tiny" else "c3po", 2)
    rows = demos_for(of, system_recipe=recipe(Settings(c3po)))
    tape = Tape(lambda role, prompt, rng: "A" if role == "gate" else write(role, prompt, rng))
    environment = tape.environment()
    system = SYSTEMS[of](BuildContext(style, 2, environment, tape, ()))
    collect(system, single_chain, [ANN, BOB], environment)
    assert [row.question for row in rows] == ["q-ann", "q-bob"]
    assert {row.prompt[-1].content for row in rows} <= set(tape.prompts)


def test_a_class_is_the_cheapest_strategy_that_answers_with_separate_policies_too():
    # Without documents the answer is Rom, correct for Bob; with documents it is Ulm, for Ann.
    rows = [(row.question, row.role, row.reply) for row in demos_for("adaptive_rag")]
    assert rows == [("q-ann", "classifier", "B"), ("q-bob", "classifier", "A")]
    apart = with_own_policies(TINY, ["router"])
    assert demos_for("adaptive_rag", system_recipe=apart) == demos_for("adaptive_rag")


@pytest.mark.parametrize(("of", "role"), [("adaptive_rag", "filter"), ("slim_plm", "drafter")])
def test_a_question_with_a_failed_reply_gives_no_demonstration(of, role):
    assert [row.question for row in demos_for(of, failing=role)] == ["q-ann"]


def test_equal_drafts_give_one_demonstration():
    (first, second) = demos_for("slim_plm", samples=3)
    prompt = (Message("user", f"gate A B\nQuestion: {ANN.text}\nDraft: Ulm, I think"),)
    assert first == Demo("q-ann", "gate", prompt, "A") and second.reply == "B"


def test_demonstrations_need_one_rollout_per_question():
    """Only trained roles have groups."""
    with_groups = opera.recipe(opera.Settings(group_size=3, expert=Injection("off")))
    effect = Generate(PLAN, (Message("user", "who"),))
    assert with_groups.expander(frozenset((PLAN,)))(effect, "who").samples == 3
    assert demo_source(with_groups).expander(effect, "who") == Branching(1)


def test_a_tree_without_all_three_strategies_is_refused():
    sampled = recipe(Settings(tree=TreeShape(router_forcing="sampled")))
    with pytest.raises(UserError, match=r"does not force \[No Retrieval\]"):
        demo_source(sampled, "adaptive_rag")
    demo_source(sampled, "slim_plm")  # does not roll out C-3PO


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ("mmoa_rag", ["--of=adaptive_rag", "--writer=tiny"], "this config has another system"),
        ("mmoa_rag", ["--of=slim_plm", "--writer=labels"], "of a config, not for --of slim_plm"),
        ("c3po", ["--of=skr_knn", "--writer=tiny"], "use one of adaptive_rag, slim_plm"),
    ],
)
def test_a_wrong_choice_is_refused_before_any_output(config, arguments, message, tmp_path, capsys):
    file, out = CONFIGS / "tiny" / f"{config}.py", tmp_path / "new" / "d.jsonl"
    assert main(["warmup", "demos", f"--config={file}", f"--out={out}", *arguments]) == 2
    assert message in capsys.readouterr().err and not out.parent.exists()


def test_other_labels_are_for_mmoa_rag_only(tmp_path, capsys):
    config, out = f"--config={CONFIGS / 'tiny' / 'c3po.py'}", f"--out={tmp_path / 'd.jsonl'}"
    assert main(["warmup", "demos", config, out, SMALL, "--writer=labels:answer"]) == 2
    assert "labels:answer is for system mmoa_rag" in capsys.readouterr().err


def test_the_command_resumes_and_refuses_other_settings(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jax_ragrl.warmstart.make_demos.load_llm", lambda *_, **__: Tape(write))
    config, out = CONFIGS / "tiny" / "mmoa_rag.py", tmp_path / "d.jsonl"
    arguments = [f"--config={config}", f"--out={out}", SMALL, "--writer=tiny"]
    for limit in (2, 3):
        assert main(["warmup", "demos", *arguments, "--of=slim_plm", f"--limit={limit}"]) == 0
        assert [(d.question, d.role) for d in load_demos(out)] == [
            (f"train-0000{i}", "gate") for i in range(limit)
        ]
    assert main(["warmup", "demos", *arguments, "--limit=3"]) == 2
    assert "config.of differs" in capsys.readouterr().err

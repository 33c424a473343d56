"""`ragrl demos`: what is kept of a rollout, and a file that goes on where it stood."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
from flax import nnx

from jax_ragrl.cli.main import CONFIGS, main
from jax_ragrl.errors import UserError
from jax_ragrl.llm.executors import query_of
from jax_ragrl.llm.reader import question_of, understand
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.rollout.expand import Branching, once
from jax_ragrl.rollout.roles import malformed
from jax_ragrl.run.config import model_of
from jax_ragrl.systems.base import Wrapped
from jax_ragrl.systems.c3po import FILTER, LLM, ROUTER, Settings, recipe, render_decision
from jax_ragrl.types import Message, Question
from jax_ragrl.warmstart import resumable as portions
from jax_ragrl.warmstart.demo_sources import right_actions
from jax_ragrl.warmstart.demos import Demo, load_demos
from jax_ragrl.warmstart.expert_pool import BEGIN
from jax_ragrl.warmstart.make_demos import DEMOS, summary
from jax_ragrl.warmstart.resumable import Made
from jax_ragrl.warmstart.teachers.c3po import Teacher
from tests.llm.server import serving
from tests.rollout.tape import ANN, BOB, PAPER, Tape, play
from tests.tiny import policy, tokenizer

# --- What is kept ---------------------------------------------------------------------------------


def demos_of(tape: Tape, *questions: Question, **given) -> list[Demo]:
    forest = play(tape, *questions, **given)
    ids = {r.action.prompt_ids for r in forest.records if r.action}
    prompts = {i: (Message("user", bytes(i).decode()),) for i in ids}
    return right_actions(recipe(Settings()), forest, prompts)


def test_what_led_to_a_right_answer_is_kept_and_nothing_else():
    texts = {ROUTER: ["[No Retrieval]", "[Retrieval] x", "[Oops]"]}
    tape = Tape(texts | {FILTER: ["Thought: t\nAction: [1]"]}, told={"answer_direct": "Rom"})
    made = demos_of(tape, BOB, ANN, Question("q-c", "Who?", ("Ulm",)))
    assert [(d.question, d.role, d.reply) for d in made] == [
        ("q-bob", "router", "[No Retrieval]"),
        ("q-ann", "router", "[Retrieval] x"),
        ("q-ann", "filter", "Thought: t\nAction: [1]"),
    ]
    assert made[0].prompt == (Message("user", f"route\nQuestion: {BOB.text}"),)


def test_every_strategy_of_the_tree_that_works_gives_an_example():
    right = render_decision("t", LLM)
    texts = {FILTER: ["Thought: a\nAction: [1]", "Thought: b\nAction: [9]"]}
    tape = Tape(texts | {"decision": [right, right]}, told={"answer": "Ulm"})
    made = demos_of(tape, ANN, expander=PAPER)
    # Without documents the answer is the same here: all three strategies are right.
    routes = [(d.reply, d.reward) for d in made if d.role == ROUTER]
    retrieval = f"[Retrieval] {ANN.text}"
    assert routes == [("[No Retrieval]", 1.0), (retrieval, 0.5), ("[Planning]", 1.0)]
    # A dead filter is half of what is below the search, and no example.
    assert [d.reply for d in made if d.role == FILTER] == ["Thought: a\nAction: [1]"]
    assert [d.reply for d in made if d.role == "decision"] == [right]


@pytest.mark.parametrize("action", ["[Oops]", "[Retrieval] x"])
def test_an_action_that_was_put_right_is_no_example(action):
    """Where only `[LLM]` is offered, another action stands for it."""
    texts = {ROUTER: ["[Planning]"], "decision": [f"Thought: t\nAction: {action}"]}
    tape = Tape(texts, told={"answer_direct": "Ulm"})
    assert [d.role for d in demos_of(tape, ANN, max_depth=6)] == [ROUTER]


def test_an_answer_that_is_right_in_part_makes_no_example():
    tape = Tape({ROUTER: ["[No Retrieval]"]}, told={"answer_direct": "Ulm or Rom"})
    forest = play(tape, ANN)
    prompts = {forest.records[0].action.prompt_ids: ()}
    strict, loose = (dataclasses.replace(recipe(Settings()), metric=m) for m in ("f1", "cover_em"))
    assert right_actions(strict, forest, prompts) == []
    assert len(right_actions(loose, forest, prompts)) == 1


def test_a_malformed_action_is_no_example_though_a_right_answer_came_of_it():
    forest = play(Tape({ROUTER: ["[No Retrieval]"]}, told={"answer_direct": "Ulm"}), ANN)
    forest.records[0].parsed = malformed("no brackets")
    assert right_actions(recipe(Settings()), forest, {}) == []


def test_what_is_written_again_in_another_rollout_is_kept_once():
    tape = Tape({ROUTER: ["[No Retrieval]"] * 2}, told={"answer_direct": "Ulm"})
    (made,) = demos_of(tape, ANN, ANN, expander=once)
    assert (made.question, made.reply, made.reward) == ("q-ann", "[No Retrieval]", 1.0)


def test_what_is_written_twice_is_worth_its_better_time():
    """Once both filters keep what the answer needs, once one of the two is dead."""
    texts = {ROUTER: ["[Retrieval] x"] * 4, FILTER: ["Thought: t\nAction: [1]"] * 3 + ["nothing"]}
    tape = Tape(texts, told={"answer": "Ulm"})
    made = demos_of(tape, ANN, ANN, expander=lambda effect, question: Branching(2))
    assert [(d.role, d.reward) for d in made] == [(ROUTER, 1.0), (FILTER, 1.0)]


class Plain(Wrapped):
    """A system whose roles read plain text."""

    @property
    def roles(self):
        return {n: dataclasses.replace(r, chat=False) for n, r in self.system.roles.items()}


def test_an_example_says_whether_its_role_reads_a_chat():
    forest = play(Tape({ROUTER: ["[No Retrieval]"]}, told={"answer_direct": "Ulm"}), ANN)
    prompts, chat = {forest.records[0].action.prompt_ids: ()}, recipe(Settings())
    plain = dataclasses.replace(chat, system=Plain(chat.system))
    assert [right_actions(r, forest, prompts)[0].chat for r in (chat, plain)] == [True, False]


# --- The file -------------------------------------------------------------------------------------

QUESTIONS = [Question(str(i), f"who {i}", ("film",)) for i in range(5)]


class Source:
    """Two demonstrations a question, one on those where something is to fail."""

    def __init__(self, *failing: str, lost: bool = False) -> None:
        self.failing, self.lost, self.asked = failing, lost, []

    def __call__(self, questions):
        self.asked += [q.id for q in questions]
        failed = {q.id: "down" for q in questions if q.id in self.failing}
        prompt = (Message("user", "who"),)
        twice = [
            Demo(q.id, "r", prompt, reply)
            for q in questions
            for reply in (["a"] if q.id in failed else ["a", "b"])
        ]
        return Made([] if self.lost else [demo.row() for demo in twice], failed)


@pytest.fixture(autouse=True)
def chunks_of_two(monkeypatch):
    monkeypatch.setattr(portions, "CHUNK", 2)


def gather(source, questions, out):
    portions.gather(source, questions, out, DEMOS)


def held(out) -> list[str]:
    return sorted(d.question + d.reply for d in load_demos(out))


def test_a_file_goes_on_where_it_stood_and_tries_again_what_failed(tmp_path):
    out, first = tmp_path / "d.jsonl", Source("1")
    gather(first, QUESTIONS[:2], out)
    assert held(out) == ["0a", "0b", "1a"]  # what worked on a failed question is not lost
    assert summary(out) == {
        "questions": 2, "with_demos": 2, "failed": 1, "error": "down", "demos": 3,
        "roles": {"r": 3}, "out": str(out),
    }  # fmt: skip
    assert [json.loads(row)["demos"] for row in DEMOS.log(out).read_text().splitlines()] == [2, 1]
    again = Source()
    gather(again, QUESTIONS, out)
    assert again.asked == ["2", "3", "4", "1"]
    assert held(out) == [f"{i}{reply}" for i in range(5) for reply in "ab"]
    assert summary(out)["failed"] == 0 and summary(out)["questions"] == 5


def test_fewer_questions_lose_nothing_of_what_was_written_for_more(tmp_path):
    out, again = tmp_path / "d.jsonl", Source()
    gather(Source("1"), QUESTIONS[:4], out)
    gather(again, QUESTIONS[:2], out)
    assert again.asked == ["1"] and held(out) == [f"{i}{reply}" for i in range(4) for reply in "ab"]


def test_what_a_killed_run_left_half_done_is_done_again(tmp_path):
    out = tmp_path / "d.jsonl"
    gather(Source(), QUESTIONS[:2], out)
    with out.open("a") as file:  # a chunk whose questions are not noted, and a torn line
        stale = Demo("2", "r", (Message("user", "who"),), "stale").row()
        file.write(json.dumps(stale) + '\n{"question": "3"')
    gather(Source(), QUESTIONS[:4], out)
    assert held(out) == [f"{i}{reply}" for i in range(4) for reply in "ab"]


@pytest.mark.parametrize("lines", range(6))
def test_a_run_that_is_killed_after_any_line_goes_on_without_loss(tmp_path, monkeypatch, lines):
    """Two questions are four demonstrations, and two lines of the log."""
    out, left, append = tmp_path / "d.jsonl", iter(range(lines)), portions.append

    def killed(file, row):
        if next(left, None) is None:
            raise KeyboardInterrupt
        append(file, row)

    with monkeypatch.context() as patch:
        patch.setattr(portions, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            gather(Source(), QUESTIONS[:2], out)
    gather(Source(), QUESTIONS[:2], out)
    assert held(out) == ["0a", "0b", "1a", "1b"]


def test_a_server_may_move_and_what_fails_is_told_by_its_last_error():
    assert model_of("openai:a/b@http://host:1/v1") == "openai:a/b"
    assert model_of('openai:a@http://host:1/v1#{"b": 1}') == 'openai:a#{"b": 1}'
    assert model_of("runs/warm@2#1") == "runs/warm@2#1"
    rows = [{"error": "slow"}, {}, {"error": "down"}]
    assert portions.failures(rows) == {"failed": 2, "error": "down"} and not any(
        portions.failures(rows[1:2]).values()
    )


def test_an_outage_ends_the_run_and_keeps_what_is_done(tmp_path):
    out, down = tmp_path / "d.jsonl", Source("2", "3", lost=True)
    with pytest.raises(UserError, match=r"all of 2 questions failed \(down\).*same command"):
        gather(down, QUESTIONS, out)
    assert len(DEMOS.log(out).read_text().splitlines()) == 2 and "4" not in down.asked


def test_a_run_ends_where_nothing_came_of_its_only_questions(tmp_path):
    with pytest.raises(UserError, match="all of 1 questions failed"):
        gather(Source("0", lost=True), QUESTIONS[:1], tmp_path / "one.jsonl")
    # Not where the last are fewer than a chunk, nor where something came of what failed.
    gather(Source("2", lost=True), QUESTIONS[:3], tmp_path / "last.jsonl")
    gather(Source("0", "1"), QUESTIONS[:2], tmp_path / "some.jsonl")
    assert held(tmp_path / "some.jsonl") == ["0a", "1a"]
    assert summary(tmp_path / "some.jsonl")["failed"] == 2  # questions, not kinds of failure


def test_one_question_that_never_works_is_counted_and_ends_nothing(tmp_path):
    out = tmp_path / "d.jsonl"
    gather(Source("4"), QUESTIONS, out)
    gather(Source("4", lost=True), QUESTIONS, out)
    assert summary(out)["failed"] == 1 and summary(out)["with_demos"] == 4


def test_what_is_begun_with_one_config_is_not_gone_on_with_by_another(tmp_path):
    out = tmp_path / "d.jsonl"
    for value in (1, 2):  # nothing is made with the first
        portions.begin(out, {"a": value}, DEMOS)
    gather(Source(), QUESTIONS[:2], out)
    with pytest.raises(UserError, match="a differs.*--out"):
        portions.begin(out, {"a": 1}, DEMOS)
    portions.begin(out, {"a": 2}, DEMOS)


def test_what_is_not_its_own_file_is_left_as_it_is(tmp_path):
    """A file of questions by mistake, whose rows have its key too; and one that was taken away."""
    out = tmp_path / "train.jsonl"
    out.write_text('{"question": "who", "answers": ["x"]}\n')
    with pytest.raises(UserError, match=r"train.jsonl holds something else.*another --out"):
        portions.begin(out, {}, DEMOS)
    assert out.read_text() == '{"question": "who", "answers": ["x"]}\n'
    gone = tmp_path / "d.jsonl"
    gone.touch()  # as where a run is killed that has just begun
    portions.begin(gone, {}, DEMOS)
    gather(Source(), QUESTIONS[:2], gone)
    gone.unlink()
    with pytest.raises(UserError, match=r"d.questions.jsonl says what is done, but .* is gone"):
        portions.begin(gone, {}, DEMOS)
    DEMOS.log(gone).unlink()
    portions.begin(gone, {"another": 1}, DEMOS)


# --- The commands ---------------------------------------------------------------------------------


def test_labels_need_a_system_that_has_them(tmp_path, capsys):
    config = f"--config={CONFIGS / 'tiny' / 'c3po.py'}"
    out = f"--out={tmp_path / 'd.jsonl'}"
    small = "--config.data.world.size=40"
    assert main(["demos", config, out, small, "--writer", "labels"]) == 2
    assert "labels is for system mmoa_rag" in capsys.readouterr().err


def test_labels_are_demonstrations(tmp_path, capsys):
    config = f"--config={CONFIGS / 'tiny' / 'mmoa_rag.py'}"
    out = tmp_path / "d.jsonl"
    given = [config, f"--out={out}", "--config.data.world.size=40", "--limit=3"]
    given.append("--config.policies=(('rewriter','tiny'),)")  # roles of their own read them too
    assert main(["demos", *given, "--writer", "labels:answer"]) == 0
    assert [(d.question, d.role) for d in load_demos(out)] == [
        (f"train-0000{i}", role) for i in range(3) for role in ("selector", "generator")
    ]
    assert json.loads(capsys.readouterr().out)["questions"] == 3
    assert main(["demos", *given, "--writer", "labels"]) == 2
    assert "writer.name differs" in capsys.readouterr().err


def test_questions_that_share_an_id_are_refused_and_one_that_is_there_twice_is_one(
    tmp_path, capsys
):
    """Two files put together: each of them may count its questions from the same number."""
    rows = [{"id": f"train_{i}", "question": f"who {i}", "golden_answers": ["x"]} for i in (0, 1)]
    other = {**rows[0], "question": "where"}
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "1", "contents": "a\nb"}) + "\n")
    config = f"--config={CONFIGS / 'tiny' / 'mmoa_rag.py'}"
    for name, written, code in (("same", [*rows, rows[0]], 0), ("other", [*rows, other], 2)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in written))
        splits = {"train": file, "dev": file, "test": file, "corpus": corpus}
        given = [f"--config.data.files.{key}={path}" for key, path in splits.items()]
        given += ["--config.llm.kind=none", f"--out={tmp_path / name / 'd.jsonl'}"]
        assert main(["demos", config, *given, "--writer=labels"]) == code
        told = capsys.readouterr()
    assert "share the id 'train_0'" in told.err and not (tmp_path / "other" / "d.jsonl").exists()
    assert {d.question for d in load_demos(tmp_path / "same" / "d.jsonl")} == {"train_0", "train_1"}


def scripted(body) -> str:
    """What the teacher of the generated encyclopedia would say for a language model."""
    prompt, begin, start = body["messages"][-1]["content"].partition(BEGIN)
    if begin:
        return f"{start} {query_of(understand(question_of(prompt)))}"
    role = {"route": ROUTER, "filter": FILTER}.get(prompt.split("\n")[0], "decision")
    rng = random.Random(body["seed"])
    return Teacher().write(role, (Message("user", prompt),), (), rng)


@pytest.mark.slow
def test_demonstrations_become_a_policy_that_training_begins_with(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    c3po, out = CONFIGS / "tiny" / "c3po.py", tmp_path / "demos.jsonl"
    small = [f"--config={c3po}", "--config.data.world.size=60"]
    with serving(scripted) as (address, seen):
        writer = ["--writer", f"openai:m@{address}", "--temperature=0.3", "--limit=5"]
        command = ["demos", *small, f"--config.policy={folder}", f"--out={out}", *writer]
        assert main(command) == 0
        count, asked = len(load_demos(out)), len(seen)
        moved = [a.replace(address, f"{address}/") for a in command]  # another address, all done
        assert main(moved) == 0
        assert len(seen) == asked and len(load_demos(out)) == count
    assert {body["temperature"] for body in seen} == {0.3}
    replies = {d.reply.partition("]")[0] for d in load_demos(out) if d.role == ROUTER}
    assert {"[Retrieval", "[Planning"} <= replies
    sft = CONFIGS / "tiny" / "sft_c3po.py"
    layout = ["--config.layout.lengths=(1024,)", "--config.layout.tokens=4096"]
    given = [f"--config.data.demos={out}", f"--config.policy={folder}", "--config.epochs=4"]
    given += ["--config.optimizer.policy_lr=0.01", f"--out={tmp_path / 'warm'}"]
    assert main(["sft", f"--config={sft}", *given, *layout]) == 0
    told = json.loads((tmp_path / "warm" / "summary.json").read_text())
    assert told["demos"] == count and told["loss"]["last"] < told["loss"]["first"] - 0.5
    shapes = ["--config.shapes.lengths=(1024,)", "--config.shapes.batches=(16,)"]
    short = {"steps": 1, "questions": 2, "dev_questions": 2, "eval_every": 1}
    run = [f"--config.run.{key}={value}" for key, value in short.items()]
    begun = [f"--config.policy={told['checkpoint']}", f"--workdir={tmp_path / 'run'}"]
    assert main(["train", *small, *begun, *shapes, *layout, *run]) == 0
    (row,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(row)["step"] == 1

"""`ragrl warmup demos`: the selection of actions, and files that resume."""

import dataclasses
import json
import random

import pytest

from jax_ragrl.cli.main import CONFIGS, main
from jax_ragrl.errors import UserError
from jax_ragrl.llm.executors import query_of
from jax_ragrl.llm.reader import question_of, understand
from jax_ragrl.rollout.expand import Branching
from jax_ragrl.rollout.llm_policy import BEGIN
from jax_ragrl.rollout.roles import invalid_action
from jax_ragrl.run.short_names import model_of
from jax_ragrl.systems.base import WrappedSystem
from jax_ragrl.systems.c3po import FILTER, LLM, ROUTER, Settings, recipe, render_decision
from jax_ragrl.types import Message, Question
from jax_ragrl.warmstart import resumable
from jax_ragrl.warmstart.demo_sources import right_actions
from jax_ragrl.warmstart.demos import Demo, load_demos
from jax_ragrl.warmstart.make_demos import DEMO_OUTPUT, demo_summary
from jax_ragrl.warmstart.resumable import ItemResults
from jax_ragrl.warmstart.teachers.c3po import Teacher
from tests.llm.server import serving
from tests.rollout.tape import ANN, BOB, PAPER, Tape, play

# --- Selection ------------------------------------------------------------------------------------


def demos_of(tape: Tape, *questions: Question, **options) -> list[Demo]:
    forest = play(tape, *questions, **options)
    ids = {r.action.prompt_ids for r in forest.records if r.action}
    prompts = {i: (Message("user", bytes(i).decode()),) for i in ids}
    return right_actions(recipe(Settings()), forest, prompts)


def test_only_actions_with_correct_answers_are_selected():
    texts = {ROUTER: ["[No Retrieval]", "[Retrieval] x", "[Oops]"]}
    tape = Tape(texts | {FILTER: ["Thought: t\nAction: [1]"]}, replies={"answer_direct": "Rom"})
    demos = demos_of(tape, BOB, ANN, Question("q-c", "Who?", ("Ulm",)))
    assert [(d.question, d.role, d.reply) for d in demos] == [
        ("q-bob", "router", "[No Retrieval]"),
        ("q-ann", "router", "[Retrieval] x"),
        ("q-ann", "filter", "Thought: t\nAction: [1]"),
    ]
    assert demos[0].prompt == (Message("user", f"route\nQuestion: {BOB.text}"),)


def test_every_correct_strategy_gives_a_demonstration():
    right = render_decision("t", LLM)
    texts = {FILTER: ["Thought: a\nAction: [1]", "Thought: b\nAction: [9]"]}
    tape = Tape(texts | {"decision": [right, right]}, replies={"answer": "Ulm"})
    demos = demos_of(tape, ANN, expander=PAPER)
    # The answer is the same without documents: all three strategies are correct.
    routes = [(d.reply, d.reward) for d in demos if d.role == ROUTER]
    retrieval = f"[Retrieval] {ANN.text}"
    assert routes == [("[No Retrieval]", 1.0), (retrieval, 0.5), ("[Planning]", 1.0)]
    # A failed filter is half of the leaves below the search, and no demonstration.
    assert [d.reply for d in demos if d.role == FILTER] == ["Thought: a\nAction: [1]"]
    assert [d.reply for d in demos if d.role == "decision"] == [right]


@pytest.mark.parametrize("action", ["[Oops]", "[Retrieval] x"])
def test_a_replaced_action_is_no_demonstration(action):
    """At the last decision only `[LLM]` is allowed, and any other action is replaced by it."""
    texts = {ROUTER: ["[Planning]"], "decision": [f"Thought: t\nAction: {action}"]}
    tape = Tape(texts, replies={"answer_direct": "Ulm"})
    assert [d.role for d in demos_of(tape, ANN, max_depth=6)] == [ROUTER]


def test_a_partly_correct_answer_gives_no_demonstration():
    tape = Tape({ROUTER: ["[No Retrieval]"]}, replies={"answer_direct": "Ulm or Rom"})
    forest = play(tape, ANN)
    prompts = {forest.records[0].action.prompt_ids: ()}
    strict, loose = (dataclasses.replace(recipe(Settings()), metric=m) for m in ("f1", "cover_em"))
    assert right_actions(strict, forest, prompts) == []
    assert len(right_actions(loose, forest, prompts)) == 1


def test_equal_actions_give_one_demonstration_with_the_larger_reward():
    """In one rollout both filters select the document, in the other one of them fails."""
    texts = {ROUTER: ["[Retrieval] x"] * 4, FILTER: ["Thought: t\nAction: [1]"] * 3 + ["nothing"]}
    tape = Tape(texts, replies={"answer": "Ulm"})
    demos = demos_of(tape, ANN, ANN, expander=lambda effect, question: Branching(2))
    assert [(d.role, d.reward) for d in demos] == [(ROUTER, 1.0), (FILTER, 1.0)]


class Plain(WrappedSystem):
    """A system whose roles read plain text."""

    @property
    def roles(self):
        return {
            n: dataclasses.replace(r, as_chat_turns=False) for n, r in self.system.roles.items()
        }


def test_a_demonstration_is_valid_and_records_whether_its_role_uses_chat():
    forest = play(Tape({ROUTER: ["[No Retrieval]"]}, replies={"answer_direct": "Ulm"}), ANN)
    prompts, chat = {forest.records[0].action.prompt_ids: ()}, recipe(Settings())
    plain = dataclasses.replace(chat, system=Plain(chat.system))
    assert [right_actions(r, forest, prompts)[0].chat for r in (chat, plain)] == [True, False]
    forest.records[0].parsed = invalid_action("no brackets")
    assert right_actions(chat, forest, prompts) == []


# --- The file -------------------------------------------------------------------------------------

QUESTIONS = [Question(str(i), f"who {i}", ("film",)) for i in range(5)]


class Source:
    """Generates two demonstrations per question, or one if the question is to fail."""

    def __init__(self, *failing: str, without_rows: bool = False) -> None:
        self.failing, self.without_rows, self.question_ids = failing, without_rows, []

    def __call__(self, questions):
        self.question_ids += [q.id for q in questions]
        failed = {q.id: "down" for q in questions if q.id in self.failing}
        prompt = (Message("user", "who"),)
        demos = [
            Demo(q.id, "r", prompt, reply)
            for q in questions
            for reply in (["a"] if q.id in failed else ["a", "b"])
        ]
        return ItemResults([] if self.without_rows else [demo.row() for demo in demos], failed)


@pytest.fixture(autouse=True)
def chunks_of_two(monkeypatch):
    monkeypatch.setattr(resumable, "CHUNK", 2)


def generate(source, questions, out):
    resumable.run_resumable(source, questions, out, DEMO_OUTPUT)


def contents(out) -> list[str]:
    return sorted(d.question + d.reply for d in load_demos(out))


def test_a_file_is_resumed_and_failed_questions_are_retried(tmp_path):
    out, first = tmp_path / "d.jsonl", Source("1")
    generate(first, QUESTIONS[:2], out)
    assert contents(out) == ["0a", "0b", "1a"]  # rows of a failed question are retained
    assert demo_summary(out) == {
        "questions": 2, "with_demos": 2, "failed": 1, "error": "down", "demos": 3,
        "roles": {"r": 3}, "out": str(out),
    }  # fmt: skip
    assert [json.loads(row)["demos"] for row in DEMO_OUTPUT.log(out).read_text().splitlines()] == [
        2,
        1,
    ]
    second = Source()
    generate(second, QUESTIONS, out)
    assert second.question_ids == ["2", "3", "4", "1"]
    assert contents(out) == [f"{i}{reply}" for i in range(5) for reply in "ab"]
    assert demo_summary(out)["failed"] == 0 and demo_summary(out)["questions"] == 5


def test_fewer_questions_remove_no_rows(tmp_path):
    out, second = tmp_path / "d.jsonl", Source()
    generate(Source("1"), QUESTIONS[:4], out)
    generate(second, QUESTIONS[:2], out)
    assert second.question_ids == ["1"] and contents(out) == [
        f"{i}{reply}" for i in range(4) for reply in "ab"
    ]


@pytest.mark.parametrize("lines", range(6))
def test_a_run_killed_after_any_line_resumes_without_loss(tmp_path, monkeypatch, lines):
    """Two questions give four demonstrations and two lines of the log."""
    out, remaining, append = tmp_path / "d.jsonl", iter(range(lines)), resumable.append_row

    def append_or_kill(file, row):
        if next(remaining, None) is None:
            raise KeyboardInterrupt
        append(file, row)

    with monkeypatch.context() as patch:
        patch.setattr(resumable, "append_row", append_or_kill)
        with pytest.raises(KeyboardInterrupt):
            generate(Source(), QUESTIONS[:2], out)
    with out.open("a") as file:
        file.write('{"question": "3"')  # an incomplete line
    generate(Source(), QUESTIONS[:2], out)
    assert contents(out) == ["0a", "0b", "1a", "1b"]


def test_model_names_ignore_addresses_and_logs_report_the_last_error():
    assert model_of("openai:a/b@http://host:1/v1") == "openai:a/b"
    assert model_of('openai:a@http://host:1/v1#{"b": 1}') == 'openai:a#{"b": 1}'
    assert model_of("runs/warm@2#1") == "runs/warm@2#1"
    rows = [{"error": "slow"}, {}, {"error": "down"}]
    assert resumable.failure_summary(rows) == {"failed": 2, "error": "down"} and not any(
        resumable.failure_summary(rows[1:2]).values()
    )


def test_an_outage_stops_the_run_and_keeps_finished_rows(tmp_path):
    out, down = tmp_path / "d.jsonl", Source("2", "3", without_rows=True)
    with pytest.raises(UserError, match=r"all of 2 questions failed \(down\).*same command"):
        generate(down, QUESTIONS, out)
    assert len(DEMO_OUTPUT.log(out).read_text().splitlines()) == 2 and "4" not in down.question_ids


def test_a_run_stops_if_all_of_its_questions_fail(tmp_path):
    with pytest.raises(UserError, match="all of 1 questions failed"):
        generate(Source("0", without_rows=True), QUESTIONS[:1], tmp_path / "one.jsonl")
    # Neither a last chunk that is not full nor failed questions with rows stop it.
    generate(Source("2", without_rows=True), QUESTIONS[:3], tmp_path / "last.jsonl")
    generate(Source("0", "1"), QUESTIONS[:2], tmp_path / "some.jsonl")
    assert contents(tmp_path / "some.jsonl") == ["0a", "1a"]
    assert demo_summary(tmp_path / "some.jsonl")["failed"] == 2  # questions, not distinct errors


def test_other_settings_do_not_resume_a_file(tmp_path):
    out = tmp_path / "d.jsonl"
    for value in (1, 2):  # no rows exist yet
        resumable.claim_output(out, {"a": value}, DEMO_OUTPUT, {})
    generate(Source(), QUESTIONS[:2], out)
    with pytest.raises(UserError, match="a differs.*--out"):
        resumable.claim_output(out, {"a": 1}, DEMO_OUTPUT, {})
    resumable.claim_output(out, {"a": 2}, DEMO_OUTPUT, {})


def test_foreign_files_are_not_overwritten(tmp_path):
    """A file of questions, whose rows have the same key, and an output that was deleted."""
    out = tmp_path / "train.jsonl"
    out.write_text('{"question": "who", "answers": ["x"]}\n')
    with pytest.raises(UserError, match=r"train.jsonl was not written by this .*another --out"):
        resumable.claim_output(out, {}, DEMO_OUTPUT, {})
    assert out.read_text() == '{"question": "who", "answers": ["x"]}\n'
    deleted = tmp_path / "d.jsonl"
    deleted.touch()  # like a run that was killed at its start
    resumable.claim_output(deleted, {}, DEMO_OUTPUT, {})
    generate(Source(), QUESTIONS[:2], deleted)
    deleted.unlink()
    message = r"d.questions.jsonl lists finished questions, but .* is missing"
    with pytest.raises(UserError, match=message):
        resumable.claim_output(deleted, {}, DEMO_OUTPUT, {})
    DEMO_OUTPUT.log(deleted).unlink()
    resumable.claim_output(deleted, {"another": 1}, DEMO_OUTPUT, {})


# --- The commands ---------------------------------------------------------------------------------


def test_labels_are_demonstrations(tmp_path, capsys):
    config = f"--config={CONFIGS / 'tiny' / 'mmoa_rag.py'}"
    out = tmp_path / "d.jsonl"
    arguments = [config, f"--out={out}", "--config.data.world.size=40", "--limit=3"]
    arguments.append("--config.policies=(('rewriter','tiny'),)")  # separate policies are allowed
    assert main(["warmup", "demos", *arguments, "--writer", "labels:answer"]) == 0
    assert [(d.question, d.role) for d in load_demos(out)] == [
        (f"train-0000{i}", role) for i in range(3) for role in ("selector", "generator")
    ]
    assert json.loads(capsys.readouterr().out)["questions"] == 3
    assert main(["warmup", "demos", *arguments, "--writer", "labels"]) == 2
    assert "writer.name differs" in capsys.readouterr().err


def test_repeated_questions_count_once_and_others_with_their_ids_do_not_resume(tmp_path, capsys):
    rows = [{"id": f"train_{i}", "question": f"who {i}", "golden_answers": ["x"]} for i in (0, 1)]
    file, corpus, out = (tmp_path / name for name in ("same.jsonl", "corpus.jsonl", "d.jsonl"))
    corpus.write_text(json.dumps({"id": "1", "contents": "a\nb"}) + "\n")
    file.write_text("".join(json.dumps(row) + "\n" for row in (*rows, rows[0])))
    splits = {"train": file, "dev": file, "test": file, "corpus": corpus}
    command = ["warmup", "demos", f"--config={CONFIGS / 'tiny' / 'mmoa_rag.py'}", "--writer=labels"]
    command += [f"--config.data.files.{key}={path}" for key, path in splits.items()]
    command += ["--config.llm.kind=none", f"--out={out}"]
    assert main(command) == 0
    demos = [d.question for d in load_demos(out)]
    assert {*demos} == {"train_0", "train_1"} and demos.count("train_0") == demos.count("train_1")
    file.write_text(file.read_text().replace("who", "where"))
    assert main(command) == 2 and "content.questions differs" in capsys.readouterr().err


def scripted(body) -> str:
    """Replies to a request of a language model like the scripted teacher."""
    prompt, begin, start = body["messages"][-1]["content"].partition(BEGIN)
    if begin:
        return f"{start} {query_of(understand(question_of(prompt)))}"
    role = {"route": ROUTER, "filter": FILTER}.get(prompt.split("\n")[0], "decision")
    rng = random.Random(body["seed"])
    return Teacher().write(role, (Message("user", prompt),), (), rng)


def test_the_writer_is_paid_once(tmp_path):
    out, config = tmp_path / "demos.jsonl", f"--config={CONFIGS / 'tiny' / 'c3po.py'}"
    with serving(scripted) as (address, bodies):
        writer = [f"--writer=openai:m@{address}", "--limit=2", "--temperature=0.3", f"--out={out}"]
        command = ["warmup", "demos", config, "--config.data.world.size=40", *writer]
        assert main(command) == 0
        requests, rows = len(bodies), out.read_text()
        # Without the output the demonstrations are made again, from the replies of the first call.
        for file in (out, DEMO_OUTPUT.log(out)):
            file.unlink()
        assert main(command) == 0
    assert len(bodies) == requests > 0 and out.read_text() == rows
    assert {body["temperature"] for body in bodies} == {0.3}

"""Dead questions, whose rollouts all earned the same, are replaced within a step."""

import pathlib
import zlib
from typing import Any

import numpy as np
import pytest

from jax_ragrl.corpus.questions import QuestionStream
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.rollout.effects import CallTool
from jax_ragrl.rollout.tools import Tool, Tools
from jax_ragrl.rollout.tree import Forest, Text
from jax_ragrl.run.build import build_components
from jax_ragrl.systems.c3po import C3PO
from jax_ragrl.training import loop
from jax_ragrl.training.log import read_metrics
from jax_ragrl.training.rollouts import collect_shard
from jax_ragrl.types import LLMRequest, Question
from tests.jobs import config_job
from tests.rollout.tape import Tape, improvise
from tests.tiny import saved_policy
from tests.training.test_outage import ROLL_OUT
from tests.training.trial import seeded_rows

pytestmark = pytest.mark.filterwarnings("ignore:guard.")
PER_STEP, STEPS = 4, 4


def has_signal(name: str) -> bool:
    """Whether some rollouts of a question are right: for a third of all, by id."""
    return zlib.crc32(name.encode()) % 3 == 0


class Routes:
    """A run of C-3PO's router with recorded replies and real updates.

    Fields:
      right: the questions to which the language model knows the answer, without a search only.
      fails: whether no call of the language model has a reply.
      asked: the questions of each rollout by step.
      trained: the questions of each update.
      credits: those of the turns of the last one.
      interrupted_at: a step whose update is interrupted once.
      tools: those that questions may call.
    """

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.interrupted_at = folder, -1
        self.right, self.fails, self.tools = has_signal, False, Tools({})
        self.asked, self.trained = list[tuple[int, list[str]]](), list[set[str]]()
        self.learn = loop.learn
        saved_policy(folder)
        monkeypatch.setattr(loop, "acting_environment", lambda *_, **__: self.environment())
        monkeypatch.setattr(loop, "learn", self.observe)
        monkeypatch.setattr(ROLL_OUT, self.collect)

    def environment(self) -> Any:
        tape = Tape(improvise, replies={"answer_direct": self.reply})
        return tape.environment()._replace(tools=self.tools)

    def reply(self, request: LLMRequest) -> str | EffectError:
        text = request.messages[-1].content
        (question,) = (q for q in self.questions if q.text in text)
        if self.fails:
            return EffectError("no route")
        return question.answers[0] if self.right(question.id) else "nobody"

    def collect(self, method: Any, environment: Any, questions: Any, step: int, *rest: int) -> Any:
        self.asked.append((step, [question.id for question in questions]))
        return collect_shard(method, environment, questions, step, *rest)

    def observe(self, method: Any, policies: Any, forest: Forest, turns: Any, step: int) -> Any:
        if step == self.interrupted_at:
            self.interrupted_at = -1
            raise KeyboardInterrupt
        numbers = {forest.records[turn.node].question for turn in turns}
        self.trained.append({forest.questions[i].id for i in numbers})
        self.credits = [turn.credit for turn in turns]
        return self.learn(method, policies, forest, turns, step)

    def train(self, workdir: str = "run", credit: str = "siblings", **run: Any) -> pathlib.Path:
        """Trains with settings of `run`; returns the folder of the run."""
        changes = {"steps": STEPS, "questions_per_step": PER_STEP, "save_every": 1} | run
        settings = {f"run.{name}": value for name, value in changes.items()}
        settings |= {"policy": self.folder / "policy", "run.dev_questions": 0, "credit": credit}
        settings |= {"objective.importance_weight_cap": 2.0, "data.world.size": 40}
        settings |= {"objective.skip_zero_advantage": False}  # which would leave out dead ones, too
        job = config_job("tiny/c3po_router", settings)
        folder = self.folder / workdir
        folder.mkdir(exist_ok=True)
        parts = build_components(job, folder)
        self.questions, self.seed = parts.questions["train"], job.seed
        loop.train(job, parts, folder)
        return folder


@pytest.fixture
def routes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Routes:
    return Routes(tmp_path, monkeypatch)


@pytest.mark.slow
def test_as_many_questions_are_asked_as_are_dead_until_the_rounds_are_used_up(routes):
    rows = read_metrics(routes.train(refill=2))
    stream, expected = QuestionStream(routes.questions, routes.seed), []
    for step in range(STEPS):
        asked, missing = [], PER_STEP
        for _ in range(3):
            asked += stream.draw(missing)
            missing = PER_STEP - sum(has_signal(q.id) for q in asked)
            if not missing:
                break
        expected.append(asked)
        assert routes.trained[step] == {q.id for q in asked if has_signal(q.id)}
        dead = sum(not has_signal(q.id) for q in asked)
        assert (rows[step]["questions/asked"], rows[step]["questions/dead"]) == (len(asked), dead)
        # Metrics of rollouts describe dead questions, too.
        assert rows[step]["frac_reward_zero_std"] == pytest.approx(dead / len(asked))
    rolled_out = [[q for s, ids in routes.asked if s == step for q in ids] for step in range(STEPS)]
    assert rolled_out == [[q.id for q in asked] for asked in expected]
    assert len({len(asked) for asked in expected}) > 1


@pytest.mark.slow
def test_without_refill_dead_questions_remain_and_asked_again_they_have_other_seeds(routes):
    rows = read_metrics(routes.train(steps=1))
    assert len(routes.trained[0]) == rows[0]["questions/asked"] == PER_STEP
    assert rows[0]["questions/dead"] == sum(not has_signal(q.id) for q in asked_first(routes))
    seeds = []
    method = loop.method_of(config_job("tiny/c3po_router"))
    for number in (0, 1, 2):
        tape = Tape(improvise, replies={"answer_direct": routes.reply})
        collect_shard(method, tape.environment(), asked_first(routes)[:1], 0, number)
        seeds.append(tape.seeds[0])
    assert len(set(seeds)) == 3


def asked_first(routes: Routes) -> list[Question]:
    return QuestionStream(routes.questions, routes.seed).draw(PER_STEP)


def confidence(forest, reward_N, rule):
    """The log-probability of the gold answer after the prompt of each action."""
    actions = np.flatnonzero(~forest.leaf_N)
    records = [forest.records[n] for n in actions]
    texts = [
        Text(r.role, r.action.prompt_ids, forest.questions[r.question].answers[0]) for r in records
    ]
    credit_N = np.zeros(len(forest.records), np.float32)
    credit_N[actions] = [logp_T.sum() for logp_T in forest.score(texts)]
    return credit_N, (~forest.leaf_N).astype(np.float32)


def test_a_credit_scores_texts_within_a_step_and_not_before_it(routes):
    credit = f"{__name__}:confidence"
    routes.train("scored", credit, steps=1)
    assert routes.credits and all(-500 < credit < 0 for credit in routes.credits)
    with pytest.raises(UserError, match=r"log-probabilities of texts, .* set run.refill=0"):
        routes.train("refilled", credit, steps=1, refill=1)


def test_failed_questions_are_not_replaced(routes):
    routes.fails = True
    with pytest.raises(UserError, match="no route"):
        routes.train(refill=3)
    assert [len(ids) for _, ids in routes.asked] == [PER_STEP]


def test_a_step_without_a_signal_changes_nothing(routes):
    """After updates, so that the optimizer has momentum."""
    folder = routes.train(refill=1, steps=2)
    before = Checkpoints(folder).meta(2)
    routes.right = lambda question: False
    folder = routes.train(refill=1, steps=3)
    after = Checkpoints(folder).meta(3)
    assert routes.trained[2] == set() and read_metrics(folder)[2]["questions/dead"] == 2 * PER_STEP
    assert after["checksums"] == before["checksums"]


def length(text: str) -> dict[str, int]:
    """A tool."""
    return {"length": len(text)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "prefers", "calls_tool"),
    [(0, False, False), (0, True, False), (1, False, False), (1, True, True)],
)
def test_a_resumed_run_is_bit_identical(routes, monkeypatch, staleness, prefers, calls_tool):
    """The rollouts in flight are saved with the questions that replaced dead ones.

    There are few questions, so that outcomes decide what later epochs ask.
    """
    if calls_tool:
        routes.tools = Tools({"length": Tool("python", f"{__name__}:length")})
        steps = C3PO.steps

        def measured_first(self, question):
            result = yield CallTool("length", {"text": question.text})
            assert result.value == length(question.text)
            yield from steps(self, question)

        monkeypatch.setattr(C3PO, "steps", measured_first)
    settings = {"refill": 2, "staleness": staleness, "prefer_signal": prefers}
    stream = QuestionStream
    monkeypatch.setattr(loop, "QuestionStream", lambda questions, seed: stream(questions[:9], seed))
    whole = routes.train("whole", **settings)
    asked, routes.asked, routes.interrupted_at = routes.asked, [], 2
    with pytest.raises(KeyboardInterrupt):
        routes.train("broken", **settings)
    broken = routes.train("broken", **settings)
    one, other = (Checkpoints(folder).meta(STEPS) for folder in (whole, broken))
    assert one == other and len(one["checksums"]) > 10
    rows = seeded_rows(whole)
    assert rows == seeded_rows(broken)
    assert [row["staleness"] for row in rows] == [0] + [staleness] * (STEPS - 1)
    assert len(asked) > STEPS
    weights = one["data"]["weights"]
    assert bool(weights) == prefers
    assert all((x == 1) == has_signal(name) for name, x in weights.items())

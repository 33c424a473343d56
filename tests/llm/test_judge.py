"""The verdicts of a judge: read as a whole, asked for again, and never guessed."""

import numpy as np
import pytest

from jax_ragrl.errors import EffectError
from jax_ragrl.llm.judge import grade_answers, judge_answers, read_verdict
from tests.rollout.tape import ANN, BOB

RIGHT = [
    *("True", "true.", "TRUE!", "**True**", "`True`", '"True"', "yes", "Yes.", "correct"),
    *("Correct!", "\n True\n", "True, because both name Ulm.", "Yes, it is."),
    *("Correct - the same city.", "It is true.", "The answer is correct.", "This isn't false."),
    *("not incorrect", "Verdict: True", "**Verdict:** yes", "### Verdict\n\nTrue"),
    "Final verdict: **True**.",
    *("The references say 1890.\nSo does the answer.\nVerdict: correct", "Answer: True"),
    *("Both name the same town.\n\nTrue", "Judgment = true", "\\boxed{True}"),
    *("<answer>True</answer>", '{"verdict": true}'),
    '{"verdict": "Yes", "reason": "it is false that they differ"}',
    *('```json\n{"reason": "no", "Verdict": "True"}\n```', '{"correct": 1}'),
    *('{"is_correct": true}', 'Here: {"judgement": "correct"}', "{'verdict': 'True'}"),
    *('{"answer": "no", "verdict": true}', "True\n\nThe false friend is not an issue."),
    "The judgement is: True",
]
WRONG = [
    *("False—the town is Ulm", "False (it was Ulm)", "Definitely false.", "False", "false."),
    *("**False**", "no", "No.", "No, it is another city.", "wrong", "untrue", "Not true"),
    *("Not true.", "This is untrue.", "False. It is not true that Bob is Ann."),
    *("incorrect; the true answer is Ulm", "Incorrect. The true answer is Ulm."),
    *("It is not correct.", "It isn't true.", "It’s not true", "That is not entirely correct."),
    *("The prediction is wrong.", "False: the correct answer is Ulm", "False – true would be Ulm"),
    *("The given answer is incorrect.", "Verdict: False"),
    *("Reason: the true answer is Ulm\nVerdict: **False**", "Verdict: not true"),
    *("The true answer is Ulm.\nFalse", "the answer: Incorrect", "Final answer: False"),
    *('{"verdict": false, "reason": "the true answer is Ulm"}', '{"verdict": "not true"}'),
    *('{"verdict": "False", "correct_answer": "true"}', '{"correct": false}', '{"correct": "no"}'),
    *('```\n{"verdict": "incorrect"}\n```', '{"verdict": false, "reason": "the true ans'),
]
UNREADABLE = [
    *("", "   ", "I cannot judge this.", "True or False?", "true/false", "Correct?", "maybe"),
    *("True. False.", "Verdict: True\nVerdict: False", "True\nVerdict: False", "False\n\nTrue"),
    *("The true answer is Ulm.", "The correct answer is yes.", "True answer: Ulm"),
    *("correct answer", "No idea.", "Not sure if it is true.", "neither true nor false"),
    *("partially correct", '{"verdict": null}', '{"verdict": "unknown"}', '{"verdict": 0.5}'),
    *('{"reason": "true"}', "{}", '{"verdict": true, "correct": false}', "[" * 10_000, "Untruex"),
    *("truely", "noon", "falsehood", "It is true that Ann was born there."),
]


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [(r, v) for v, own in ((True, RIGHT), (False, WRONG), (None, UNREADABLE)) for r in own],
)
def test_a_verdict_is_parsed_and_never_searched_for(reply, verdict):
    assert read_verdict(reply) is verdict


class Judge:
    """A judge that gives the replies of a list, and notes its requests."""

    name = "judge"

    def __init__(self, *replies):
        self.replies, self.requests = list(replies), []

    def complete(self, requests):
        self.requests.append(tuple(requests))
        return [self.replies.pop(0) for _ in requests]


def test_a_reply_without_verdict_is_asked_for_again_by_another_request():
    judge = Judge("Hm.", "True", "", "False", "I cannot.")
    graded = grade_answers(judge, [ANN, ANN, BOB, ANN], ["x", "Ulm", "y", "x"])
    np.testing.assert_array_equal(graded, [0.0, 1.0, np.nan, 0.0])
    first, second = judge.requests
    assert len(first) == 3 and len(second) == 2 and not set(first) & set(second)
    assert [m.role for m in second[0].messages] == ["user", "assistant", "user"]
    assert second[0].messages[1].content == "Hm." and second[1].messages[1].content


def test_an_answer_without_verdict_has_a_reason():
    judge = Judge("<think>True</think>", EffectError("down"), "I cannot judge this.")
    questions, answers = [ANN, BOB, ANN, ANN], ["x", "y", "", None]
    unread, failed, *none = judge_answers(judge, questions, answers)
    assert isinstance(unread, EffectError) and "'I cannot judge this.'" in str(unread)
    assert str(failed) == "down" and none == [0.0, 0.0]
    assert len(judge.requests[1]) == 1  # a request that failed is not sent again

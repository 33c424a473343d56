"""A listwise reranker follows the order in a reply, whatever surrounds it."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.listwise import ListwiseReranker, parse_order, windows
from jax_ragrl.types import Passage


@pytest.mark.parametrize(
    ("reply", "order"),
    [
        ("3 > 1 > 2 > 4", [2, 0, 1, 3]),
        ("[3] > [1]", [2, 0, 1, 3]),
        ("3>3>9>0>2", [2, 1, 0, 3]),  # repeated and unknown numbers
        ("2", [1, 0, 2, 3]),
        ("[4].", [3, 0, 1, 2]),
        ("", [0, 1, 2, 3]),
        ("Of 4 passages none helps", [0, 1, 2, 3]),
        ("Such as 2 > 1. The order is 4 > 3 > 1", [3, 2, 0, 1]),
        ("first 1 > 2, no: 2 > 1", [1, 0, 2, 3]),
        ("99999999999999999999 > 2", [1, 0, 2, 3]),
    ],
)
def test_an_order_is_parsed_and_the_rest_keeps_its_place(reply, order):
    assert parse_order(reply, 4) == order


@pytest.mark.parametrize("count", range(0, 75))
def test_windows_cover_all_places_from_the_last_to_the_first(count):
    slides = windows(count, 20, 10)
    assert set().union(*(range(count)[w] for w in slides)) == (
        set(range(count)) if count > 1 else set()
    )
    starts = [w.start for w in slides]
    assert starts == sorted(starts, reverse=True) and all(w.stop - w.start <= 20 for w in slides)
    # Each window shares places with the one before, so that a passage can rise through all.
    assert all(before.start < after.stop for before, after in zip(slides, slides[1:], strict=False))
    assert not slides or (slides[-1].start == 0 and slides[0].stop == count)


class Best:
    """Writes the passages of a prompt by the number in their text, largest first."""

    name = "best"

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.prompts: list[str] = []

    def complete(self, requests):
        self.batches.append(len(requests))
        self.prompts += [request.messages[-1].content for request in requests]
        return [self._reply(request.messages[-1].content) for request in requests]

    def _reply(self, prompt):
        if "fail" in prompt:
            return EffectError("offline")
        pairs = re.findall(r"^\[(\d+)\].* value (\d+)", prompt, re.MULTILINE)
        return " > ".join(n for n, _ in sorted(pairs, key=lambda pair: -int(pair[1])))


def passages(*values):
    return tuple(Passage(str(v), f"T{v}", f"value {v} " + "word " * 500) for v in values)


def test_the_best_passage_rises_from_the_last_window():
    llm = Best()
    reranker = ListwiseReranker(llm, width=4, stride=2)
    long, short = passages(*range(9)), passages(5, 7)
    scores = reranker.scores_of([("who", long), ("x", short), ("y", ()), ("z", short[:1])])
    assert np.argsort(-scores[0])[:2].tolist() == [8, 7], "the two best of nine are first"
    assert scores[0].dtype == np.float32 and scores[0].max() == 1
    assert [score.tolist() for score in scores[1:]] == [[0.5, 1.0], [], [1.0]]
    assert llm.batches == [2, 1, 1, 1], "windows of several queries are one batch"
    assert "Query: who" in llm.prompts[0] and len(llm.prompts[0].split()) < 4 * 320
    again = ListwiseReranker(Best(), width=4, stride=2).scores_of([("who", long)])
    assert again[0].tolist() == scores[0].tolist()


def test_a_query_whose_request_failed_has_the_error():
    failed, good = ListwiseReranker(Best()).scores_of(
        [("fail", passages(1, 2)), ("x", passages(1, 2))]
    )
    assert isinstance(failed, EffectError) and good.tolist() == [0.5, 1.0]
    wrong = SimpleNamespace(complete=lambda requests: [b"2 > 1"])
    with pytest.raises(UserError, match="returned a reply of type bytes for 1 requests"):
        ListwiseReranker(wrong).scores_of([("x", passages(1, 2))])


def test_an_order_in_the_reasoning_of_a_model_is_not_its_order():
    class Thinks(Best):
        def _reply(self, prompt):
            return "<think>Maybe 1 > 2 > 3 > 4</think>\n2 > 1"

    (scores,) = ListwiseReranker(Thinks()).scores_of([("who", passages(1, 2, 3, 4))])
    assert np.argsort(-scores).tolist() == [1, 0, 2, 3]

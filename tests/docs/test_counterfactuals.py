"""The counterfactual branches of own_system.md against exact gradients and a search agent."""

import itertools
import math
import re

import numpy as np
import pytest

from jax_ragrl.rollout.effects import Done, Generate
from jax_ragrl.rollout.expand import ForcedAction, Tree
from jax_ragrl.rollout.rewards import leaf_rewards
from jax_ragrl.rollout.roles import ParsedAction, Role, parse_action
from jax_ragrl.systems.baselines.executor import AGENT, SearchAgent
from jax_ragrl.types import Message
from tests.docs.pages import PYTHON, ROOT, blocks
from tests.rollout.tape import ANN, talk

PAGE = ROOT / "docs" / "howto" / "own_system.md"
(EXAMPLE,) = [block for block in blocks(PAGE, PYTHON) if block.marker == "file: search_gain.py"]
exec(compile(EXAMPLE.text, EXAMPLE.name, "exec"), example := {})

REWARD = {"answer": 0.3, "good": 1.0, "bad": 0.0}
# The probabilities of the actions of each role; the first one is that of a logistic policy.
POLICY = {"first": {"search": 0.6, "answer": 0.4}, "second": {"good": 0.25, "bad": 0.75}}
# The gradient by the logit of each role, in a state of that role: p (1 - p) (Q(first) - Q(other)).
EXACT = {"first": 0.6 * 0.4 * (0.25 - 0.3), "second": 0.25 * 0.75 * (1.0 - 0.0)}
SAMPLES = 2


class Toy:
    """An answer at once, or a search after which another action decides."""

    roles = {name: Role(name, ParsedAction) for name in POLICY}

    def steps(self, question):
        action = yield Generate("first", (Message("user", "search?"),))
        if action.text == "search":
            action = yield Generate("second", (Message("user", "now?"),), 2)
        yield Done(action.text)


@pytest.mark.parametrize("second", ["good", "bad"])
@pytest.mark.parametrize("first", ["search", "answer"])
def test_a_forced_action_is_a_baseline_whichever_it_is(first, second):
    """Over all draws of the samples, credit times score is the gradient of the expected reward."""
    # The search is always tried, so that all draws have both decisions.
    forced = {"first": (first, "search"), "second": (second,)}
    forced = {role: tuple(map(ForcedAction, dict.fromkeys(forced[role]))) for role in forced}
    tree, mean, total = (
        Tree(forced_actions=forced, free_samples=SAMPLES),
        dict.fromkeys(EXACT, 0.0),
        0.0,
    )
    draws = [itertools.product(words, repeat=SAMPLES) for words in POLICY.values()]
    for texts in itertools.product(*draws):
        by_role = dict(zip(POLICY, texts, strict=True))
        chance = math.prod(POLICY[role][word] for role in POLICY for word in by_role[role])
        forest, _ = talk(Toy(), {role: [*words] for role, words in by_role.items()}, expander=tree)
        reward_N = leaf_rewards(lambda question, answer: REWARD[answer], forest)
        credit_N, weight_N = example["gain"](forest, reward_N, None)
        for node in np.flatnonzero(weight_N):
            role, word = forest.records[node].role, forest.records[node].action.text
            assert word in by_role[role], "a forced action that the policy did not sample"
            likely = POLICY[role]
            score = (word == next(iter(likely))) - next(iter(likely.values()))
            mean[role] += chance * float(credit_N[node]) * score
        total += chance
    assert total == pytest.approx(1)
    assert mean == pytest.approx({role: SAMPLES * x for role, x in EXACT.items()}, rel=1e-5)


def test_the_branches_of_a_search_agent_answer_at_once_and_search_for_the_question():
    (text,) = re.findall(r"^`(Tree\(.*\))`\.$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    tree = eval(text, {"Tree": Tree, "ForcedAction": ForcedAction})
    system = SearchAgent("search_r1", style="coda_tiny", top_k=3, max_turns=2)
    no_search, _ = tree.forced_actions[AGENT]
    answer = parse_action(system.roles[AGENT], no_search.text + "Ulm</answer>")
    assert not no_search.complete and answer.action == "answer" and answer.args == ("Ulm",)
    forest, tape = talk(system, {AGENT: ["<answer>Rom</answer>"] * 8}, expander=tree)
    assert ("search", ANN.text, 3) in tape.log
    assert forest.forced_N.any() and not forest.forced_N[forest.leaf_N].any()

"""Two credits for search agents after methods of 2026, to be audited.

    PYTHONPATH=docs/lab ragrl bench credit --config=configs/tiny/search_r1.py --folder runs/hind \
        --config.policy=runs/warm/checkpoint --config.packing.row_lengths="(160,352,576)" \
        --config.packing.tokens_per_device=2304 \
        --rules hindsight:hindsight,hindsight:evidence,rollouts

`hindsight` is the signal of SD-Search (Ma et al. 2026, 2605.18299): the policy becomes its own
teacher by reading what the rollouts of the question searched for and how they ended. The paper
matches the distributions of all tokens of a query; for the tokens that were sampled, and in the
mean over an action, the gradient of KL(policy | teacher) has the credit

  log pi(action | context, block) - log pi(action | context),   mean over its tokens.

`evidence` pays the search that finds a gold passage first in its rollout, as STAMP does
(2607.11172, whose text could not be read); the last turn earns the reward of the answer.
"""

import numpy as np
from information_gain import groups

from jax_ragrl.credit.assign import Rule, compare, over_rollouts, reachable_leaves
from jax_ragrl.rollout.tree import NO_PARENT, SEARCH, Forest, Text
from jax_ragrl.systems.base import path_from_root


def hindsight(forest: Forest, reward_N: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """What reading the outcomes adds to the log-probability of an action; credit and weight, `[N]`.

    A question's block stands at the end of the prompt and has a line per rollout.
    """
    lines: dict[int, list[str]] = {}
    for leaf in np.flatnonzero(forest.leaf_N).tolist():
        record = forest.records[leaf]
        queries = "; ".join(call.request for call in record.calls if call.purpose == SEARCH)
        end = "right" if reward_N[leaf] > 0.5 else "wrong"
        lines.setdefault(record.question, []).append(f"{queries}: {end}")
    actions = np.flatnonzero(~forest.leaf_N)
    texts = []
    for record in (forest.records[n] for n in actions):
        block = "\n".join([*lines[record.question], ""])
        own = Text(record.role, record.action.prompt_ids, record.action.text)
        texts += [own._replace(opening=block), own]
    logps = [logp_T.mean() if len(logp_T) else 0.0 for logp_T in forest.score(texts)]
    credit_N, weight_N = over_rollouts(forest, reward_N, rule)
    credit_N[actions] = np.subtract(logps[::2], logps[1::2])
    return credit_N, weight_N


def evidence(forest: Forest, reward_N: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """The share of gold that a turn is the first to find, and what follows, compared as IGPO's."""
    turn_N = np.zeros(len(reward_N), np.float32)
    for leaf in np.flatnonzero(forest.leaf_N).tolist():
        gold = set(forest.questions[forest.question_N[leaf]].gold)
        turns, found = path_from_root(forest, leaf), set()
        for n in turns:
            names = set[str]().union(*(p.names for p in forest.records[n].passages))
            new = (gold & names) - found
            turn_N[n] = len(new) / max(len(gold), 1)
            found |= new
    parents = forest.parent_N[forest.leaf_N]
    last = parents != NO_PARENT
    turn_N[parents[last]] = reward_N[forest.leaf_N][last]
    credit_N, leaves_N = reachable_leaves(forest, compare(rule, turn_N, groups(forest)))
    return credit_N, (leaves_N > 0).astype(np.float32)

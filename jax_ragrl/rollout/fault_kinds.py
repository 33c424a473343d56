"""The kinds of malformed actions and of early ends, each with one sentence that explains it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

# In the order of the alphabet. `systems` raises these; a test compares the two.
FAULTS: Mapping[str, str] = MappingProxyType(
    {
        "Cut Plan": "The plan has more steps than the system accepts, so its end was cut.",
        "Decomposed Twice": "A sub-question was decomposed again, which is allowed once.",
        "Decomposition Not Alone": "A workflow lists a decomposition and other executors.",
        "Duplicate Document": "The same document is selected more than once.",
        "Empty Action": "The tag of the action holds no text.",
        "Empty Answer": "The final answer holds no text.",
        "Empty Draft": "The draft answer holds no text.",
        "Empty Query": "The rewritten query holds no text.",
        "Empty Thought": "The step of reasoning holds no text.",
        "Empty Workflow": "The workflow lists no executor.",
        "Hallucinate Document Idx": "The selection names a document that was not shown.",
        "Invalid Action": "The prompt does not offer this action.",
        "Invalid Class": "The prompt does not offer this class of questions.",
        "Invalid Document Idx": "The selection holds something other than numbers of documents.",
        "Invalid Format": "The text lacks the form that the prompt demands.",
        "Invalid Gate": "The prompt does not offer this verdict on whether to search.",
        "Invalid Grade": "The grade of a passage is not a number of the scale.",
        "Invalid Selection": "None of the selected documents was shown.",
        "Invalid Verdict": "The verdict is neither yes nor no.",
        "Max Depth": "The rollout reached its largest number of levels without an answer.",
        "Missing Answer": "A sub-goal needs the answer of an earlier one that failed.",
        "No Action": "The text holds no tag of an action.",
        "No Answer": "The text holds no answer.",
        "No Answer At The End": "The workflow does not end with the executor that answers.",
        "No JSON": "The query is not in a JSON object.",
        "No Legal Workflow": "The planner wrote no workflow that can be executed.",
        "No Plan": "The text holds no list of sub-goals.",
        "No Query": "The text holds no query.",
        "No Status": "The analysis does not say whether the documents suffice.",
        "No Sub-Answer": "No sub-question has an answer.",
        "No Sub-Question": "The decomposition holds no sub-question.",
        "Nothing To Select From": "The workflow selects documents before it has searched for any.",
        "Out Of Turns": "The planner's turns were spent before every sub-question had an answer.",
        "Out of Rewrites": "Every rewritten query of a sub-goal failed.",
        "Out of Turns": "The last turn was spent without an answer.",
        "Overwritten Action": "Another search was asked for when only an answer was offered.",
        "Prompt Too Long": "The prompt exceeds the longest static shape, so nothing was sampled.",
        "Repeated Executor": "The workflow lists the same executor twice.",
        "Too Many Queries": "The text holds more queries than the system accepts.",
        "Too Many Sub-Questions": "The decomposition has more sub-questions than are accepted.",
        "Unclosed Thought": "The think block never ends.",
        "Unknown Document": "The selection also names a document that was not shown.",
        "Unknown Executor": "The workflow names an executor that does not exist.",
    }
)


def explain(kind: str) -> str:
    """Returns the sentence of a kind; empty for an unknown one.

    Args:
      kind: an error of an action or a finish reason, such as `answered, Out Of Turns`.
    """
    return FAULTS.get(kind) or FAULTS.get(kind.removeprefix("answered, "), "")


def explain_all(kinds: Iterable[str]) -> dict[str, str]:
    """Returns the sentences of the kinds that have one, in order of the alphabet."""
    return {kind: text for kind in sorted(set(kinds)) if (text := explain(kind))}

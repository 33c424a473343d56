"""The table of the papers' claims: `configs/claims` with the results of docs/data/claims.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from results import DATA

from jax_ragrl.evaluation.suite import markdown_table as table
from jax_ragrl.experiments.claims import (
    OPEN,
    Claim,
    evidence_of,
    load_claims,
    load_results,
)
from jax_ragrl.experiments.pairs import FAILS, HOLDS

COLUMNS = (
    "#",
    "claim",
    "verdict",
    "evidence: difference, 95 %, could be seen",
    "seeds",
)
NOT_RUN = "not run"
# Claims that were undecided at first, and the number of measurements: with more seeds (3, 9, 15,
# 29), new trainings (22, 25), another price (18), world (5), length of imitation (21) or hops (29).
LOOKS = {3: 3, 5: 2, 9: 2, 15: 2, 18: 3, 21: 2, 22: 2, 25: 2, 29: 3}
LATE_RULE = (19, 27)  # undecided until small gains had a rule


def markdown() -> str:
    """Every claim with its verdict, or the reason for no verdict; the commands are below."""
    results = {row["number"]: row for row in load_results(DATA / "claims.json")}
    rows = [row_of(claim, results.get(claim.number)) for claim in load_claims()]
    return "\n".join([summary(rows), "", table(COLUMNS, rows), origins(list(results.values()))])


def row_of(claim: Claim, result: Mapping[str, Any] | None) -> tuple[str, ...]:
    """One row of the table.

    Args:
      claim: the claim as `configs/claims` has it.
      result: its row in claims.json, if it has been decided.
    """
    text = f"{claim.statement} ({claim.source})"
    if result is None:
        can_run = claim.pairs or claim.tests
        return str(claim.number), text, NOT_RUN if can_run else OPEN, claim.missing, ""
    lines = "<br>".join(map(line_of, evidence_of(result)))
    seeds = ", ".join(map(str, result.get("seeds", ())))
    return str(claim.number), text, result["verdict"] + mark_of(result), lines, seeds


def mark_of(result: Mapping[str, Any]) -> str:
    """The look of a verdict that is not of the first one, with its p-value for all looks.

    The largest adjusted p-value of the pairs with this verdict is multiplied by the number of looks
    (Bonferroni).
    """
    number, verdict = result["number"], result["verdict"]
    if number in LATE_RULE:
        return ", by a later rule"
    if number not in LOOKS:
        return ""
    looks = LOOKS[number]
    p_values = [pair["p_adjusted"] for pair in result["pairs"] if pair["verdict"] == verdict]
    p = f", p {max(p_values) * looks:.4f}" if p_values and verdict in (HOLDS, FAILS) else ""
    return f", look {looks}{p}"


def line_of(evidence: tuple[str, str, str, str]) -> str:
    """One pair, test or reason of a claim."""
    what, difference, detectable, verdict = evidence
    if verdict == OPEN:
        return f"open: {what}"
    numbers = f": {difference}, {detectable}" if difference else ""
    return f"{what}{numbers}: {verdict}"


def summary(rows: Sequence[tuple[str, ...]]) -> str:
    """The number of claims by verdict."""
    verdicts = [row[2].partition(", ")[0] for row in rows]
    counts = (f"{name} {verdicts.count(name)}" for name in dict.fromkeys(sorted(verdicts)))
    return f"Verdicts on {len(rows)} claims: {', '.join(counts)}."


def origins(results: Sequence[Mapping[str, Any]]) -> str:
    """The command, commit and device of each result; results measured alike share a line."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for row in results:
        number = str(row["number"])
        # The commands of claims that were measured alike differ in the number of the claim alone.
        options = row["command"].removeprefix(f"ragrl experiment reproduce --claims {number}")
        lines.setdefault((options, row["commit"], row["device"]), []).append(number)
    return "".join(
        f"- `ragrl experiment reproduce --claims {','.join(numbers)}{options}`, "
        f"commit `{commit}`, {device}.\n"
        for (options, commit, device), numbers in lines.items()
    )

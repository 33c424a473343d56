"""Pools the decisions of audits of several seeds, and compares the worth of rules.

    python docs/lab/pool_audits.py "5 chains, rollouts, leave_one_out" runs/audit-1 runs/audit-2

prints as JSON the measures of each rule over all decisions and by depth, with 95 % intervals, as
`ragrl bench credit` has them for one seed, and `over`: its worth minus that of the rule named, by
the same draws of decisions.
"""

import json
import pathlib
import sys

import numpy as np

from jax_ragrl.bench.credit import WITH_INTERVAL
from jax_ragrl.bench.fidelity import RESAMPLES, Replay, measures, moments_of, with_intervals
from jax_ragrl.credit.assign import RETURN_CREDITS
from jax_ragrl.runtime.jsonl import read_rows


def main(reference: str, *folders: str) -> None:
    rows = [
        row
        for folder in folders
        for row in read_rows(pathlib.Path(folder) / "decisions.jsonl")
        if "skipped" not in row
    ]
    depths = {f"depth {d}": [row for row in rows if row["depth"] == d] for d in (1, 2, 3)}
    groups = {"all": rows} | depths
    print(json.dumps({name: table(own, reference) for name, own in groups.items() if own}))


def table(rows: list[dict], reference: str) -> dict:
    moments = {name: np.array([of_rule(row, name) for row in rows]) for name in rows[0]["rules"]}
    drawn = np.random.default_rng(0).integers(0, len(rows), (RESAMPLES, len(rows)))

    def worth(name: str, draws: np.ndarray) -> np.ndarray:
        return np.asarray(measures(moments[name][draws].mean(-2))["worth"])

    whole, cells = np.arange(len(rows)), {}
    for name, moments_DX in moments.items():
        found = with_intervals(list(moments_DX))
        gap = worth(name, drawn) - worth(reference, drawn)
        over = float(worth(name, whole) - worth(reference, whole))
        ends = np.quantile(gap[np.isfinite(gap)], [0.025, 0.975])
        cells[name] = {key: np.round(found[key], 2).tolist() for key in WITH_INTERVAL}
        cells[name]["over"] = np.round([over, *ends], 2).tolist()
    return {"decisions": len(rows), "rules": cells}


def of_rule(row: dict, name: str) -> np.ndarray:
    draws = row["rules"][name]
    replayed = Replay(**{k: np.array(v, np.float64) for k, v in row["replay"].items()})
    credit = np.array(draws["credit"], np.float64)
    is_return = name.split(", ")[-1] in RETURN_CREDITS
    return moments_of(
        credit, replayed, is_return=is_return, tokens=draws["tokens"], actions=draws["actions"]
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

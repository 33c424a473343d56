"""Pools the decisions of audits of several seeds, and compares the worth of rules.

    python docs/lab/pool_audits.py "5 chains, rollouts, leave_one_out" runs/audit-1 runs/audit-2

prints as JSON the measures of each rule over all decisions and by depth, with 95 % intervals, as
`ragrl bench credit` has them for one seed (null: too few decisions), and `over`: its worth minus
that of the rule named, by the same draws of decisions.
"""

import json
import pathlib
import sys

import numpy as np

from jax_ragrl.bench.credit import GROUP_RULES, WITH_INTERVAL, moments_in
from jax_ragrl.bench.fidelity import RESAMPLES, measures, with_intervals
from jax_ragrl.runtime.jsonl import read_rows

COMPARING = tuple(rule.__name__ for rule in GROUP_RULES)  # the names of other rules are returns


def main(reference: str, *folders: str) -> None:
    rows = [
        row
        for folder in folders
        for row in read_rows(pathlib.Path(folder) / "decisions.jsonl")
        if "skipped" not in row
    ]
    groups = {"all": rows}
    for depth in sorted({row["depth"] for row in rows}):
        groups[f"depth {depth}"] = [row for row in rows if row["depth"] == depth]
    print(json.dumps({name: table(own, reference) for name, own in groups.items()}))


def table(rows: list[dict], reference: str) -> dict:
    drawn = np.random.default_rng(0).integers(0, len(rows), (RESAMPLES, len(rows)))
    found, worth = {}, {}
    for name in rows[0]["rules"]:
        is_return = not name.endswith(COMPARING)
        moments_DX = np.array([moments_in(row, name, is_return=is_return) for row in rows])
        found[name] = with_intervals(list(moments_DX))
        worth[name] = np.asarray(measures(moments_DX[drawn].mean(1))["worth"])
    cells = {}
    for name, own in found.items():
        gap = worth[name] - worth[reference]
        over = own["worth"][0] - found[reference]["worth"][0]
        # As `with_intervals`: too few decisions have no interval.
        is_enough = np.isfinite([own["worth"][1], found[reference]["worth"][1]]).all()
        ends = np.nanquantile(gap, [0.025, 0.975]) if is_enough else (np.nan, np.nan)
        shown = {key: own[key] for key in WITH_INTERVAL} | {"over": (over, *ends)}
        cells[name] = {
            key: [round(float(x), 2) if np.isfinite(x) else None for x in values]
            for key, values in shown.items()
        }
    return {"decisions": len(rows), "rules": cells}


if __name__ == "__main__":
    main(*sys.argv[1:])

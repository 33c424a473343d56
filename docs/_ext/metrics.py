"""Every metric of a run, from the one table in the code."""

from __future__ import annotations


def markdown() -> str:
    """One entry per metric, grouped as the table is."""
    from jax_ragrl.train.metric_names import METRICS

    parts = []
    for group, rows in METRICS.items():
        parts.append(f"## {group}\n")
        parts += [f":::{{metric}} {name}\n{text}\n:::\n" for name, text in rows.items()]
    return "\n".join(parts)

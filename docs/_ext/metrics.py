"""Every metric of a run, from the one table in the code."""

from __future__ import annotations

from jax_ragrl.run.metric_names import EVALUATION, GUARD, ROLLOUT, SERVERS, SPEED, UPDATE, Metric

GROUPS = {
    "Rollouts": ROLLOUT,
    "Servers": SERVERS,
    "Updates": UPDATE,
    "Evaluation": EVALUATION,
    "Guard": GUARD,
    "Speed": SPEED,
}


def markdown() -> str:
    """One entry per metric, grouped as the table is."""
    parts = []
    for title, metrics in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [entry(metric) for metric in metrics]
    return "\n".join(parts)


def entry(metric: Metric) -> str:
    """One metric as a directive, which gives it a link of its own."""
    meaning = metric.meaning[0].upper() + metric.meaning[1:]
    per_policy = " Logged per policy if there are several." if metric.per_policy else ""
    return (
        f":::{{metric}} {metric.name} | {metric.name}: {metric.unit}\n{meaning}.{per_policy}\n:::\n"
    )

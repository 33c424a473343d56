"""Claims across the papers, see `jax_ragrl.experiments.claims`."""

from ml_collections import ConfigDict


def arm(*overrides: str) -> dict:
    return {
        "config": "configs/tiny/mao_arag.py",
        "overrides": overrides,
        "warm_up": "configs/tiny/warmup_mao_arag.py",
    }


CLAIMS = (
    {
        "number": 30,
        "statement": "On one world, with one reader and one budget, the five systems have an "
        "order.",
        "source": "none of the papers",
        "missing": "the systems share no reader, and MMOA-RAG answers questions of one hop only",
    },
    {
        "number": 31,
        "statement": "Where the KL penalty is, how losses are averaged and whether advantages are "
        "whitened matters.",
        "source": "none of the papers",
        "arms": {
            "MAO-ARAG": arm(),
            "KL in the loss": arm("objective.kl.where=loss", "objective.kl.estimator=k3"),
            "mean per role": arm("objective.aggregation=role_sum"),
            "not whitened": arm("objective.advantage=gae"),
        },
        # Arms that are equal within the margin contradict the claim.
        "pairs": tuple(
            {"first": name, "second": "MAO-ARAG", "kind": "differs"}
            for name in ("KL in the loss", "mean per role", "not whitened")
        ),
    },
)


def get_config() -> ConfigDict:
    return ConfigDict({"claims": CLAIMS})

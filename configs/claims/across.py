"""Claims across the papers, see `jax_ragrl.experiments.claims`."""

from ml_collections import ConfigDict

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
        "missing": "no direction is claimed: compare them with 'ragrl experiment'",
    },
)


def get_config() -> ConfigDict:
    return ConfigDict({"claims": CLAIMS})

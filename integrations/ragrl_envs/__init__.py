"""Questions with a search tool and an exact reward, as environments of verifiers and OpenEnv.

The data set `world` is the generated encyclopedia; `mixture`, `nq` and `musique` are those of
`jax_ragrl/data`. Passages come from a running `ragrl serve retriever`.
"""

from __future__ import annotations

from typing import Any

# verifiers finds the taskset of the id `ragrl-envs` by this list.
__all__ = ["QuestionTaskset"]


def __getattr__(name: str) -> Any:
    """Imports verifiers on first use, which is not installed beside OpenEnv."""
    if name not in __all__:
        raise AttributeError(f"module 'ragrl_envs' has no attribute {name!r}")
    from ragrl_envs.taskset import QuestionTaskset

    return QuestionTaskset

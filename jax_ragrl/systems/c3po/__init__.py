"""C-3PO: a small proxy between a frozen retriever and a frozen language model."""

from jax_ragrl.systems.c3po.recipe import Settings, TreeShape, recipe, table_system
from jax_ragrl.systems.c3po.system import (
    C3PO,
    DECISION,
    FILTER,
    LLM,
    MAX_QUERY_WORDS,
    NO_RETRIEVAL,
    PLANNING,
    RETRIEVAL,
    ROUTER,
    accumulate,
    parse_decision,
    parse_filter,
    parse_router,
    render_decision,
    render_filter,
    render_router,
)

__all__ = [
    "C3PO",
    "DECISION",
    "FILTER",
    "LLM",
    "MAX_QUERY_WORDS",
    "NO_RETRIEVAL",
    "PLANNING",
    "RETRIEVAL",
    "ROUTER",
    "Settings",
    "TreeShape",
    "accumulate",
    "parse_decision",
    "parse_filter",
    "parse_router",
    "recipe",
    "render_decision",
    "render_filter",
    "render_router",
    "table_system",
]

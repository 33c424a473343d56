"""Former names of config keys, so that older config files, overrides and runs still load.

A former key is a dotted path; the longest entry that a path begins with is replaced. Elements of a
list (`stages`, `schedule.phases`) are sections under the list's own path.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

# Each entry has the complete current path, so that one replacement suffices.
ALIASES: Mapping[str, str] = {
    "compute": "compute_dtype",
    "layout": "packing",
    "layout.lengths": "packing.row_lengths",
    "layout.tokens": "packing.tokens_per_device",
    "layout.halvings": "packing.max_batch_halvings",
    "shapes.lengths": "shapes.prompt_lengths",
    "shapes.batches": "shapes.batch_sizes",
    "shapes.steps": "shapes.max_new_tokens",
    "shapes.tokens": "shapes.max_prompt_tokens",
    "shapes.slots": "shapes.initial_cache_size",
    "objective.dual": "objective.dual_clip",
    "objective.stale_cap": "objective.importance_weight_cap",
    "objective.entropy": "objective.entropy_coefficient",
    "objective.span": "objective.gae_span",
    "objective.kl.floor": "objective.kl.min_coefficient",
    "optimizer.warmup": "optimizer.warmup_fraction",
    "optimizer.final": "optimizer.final_lr_fraction",
    "optimizer.moments": "optimizer.moment_dtype",
    "schedule.every": "schedule.role_periods",
    "schedule.together": "schedule.joint_steps",
    "schedule.phases.kl": "schedule.phases.kl_coefficient",
    "run.questions": "run.questions_per_step",
    "run.cohorts": "run.pipeline_groups",
    "run.trees_every": "run.save_trees_every",
    "run.trees": "run.trees_per_save",
    "run.baselines": "run.baseline_style",
    "run.wandb": "run.wandb_project",
    "data.world.famous": "data.world.famous_fraction",
    "data.files.train_each": "data.files.max_train_per_file",
    "llm.documents": "llm.max_documents",
    "llm.extra": "llm.extra_body",
    "judge.documents": "judge.max_documents",
    "judge.extra": "judge.extra_body",
    "writer.documents": "writer.max_documents",
    "writer.extra": "writer.extra_body",
    # `ragrl sft`
    "rows": "examples",
    "batch": "batch_size",
    # `ragrl warmup`
    "start": "policy",
    "tokens": "tokens_per_step",
    "buckets": "row_lengths",
    "prompt_weight": "prompt_loss_weight",
    "known_world": "known_world_seed",
    "stages.passages": "stages.passages_per_search",
    "stages.worlds_from": "stages.first_world_seed",
    "stages.questions": "stages.questions_per_world",
    "stages.facts": "stages.known_facts_per_world",
}


# Former values by the current name of their key.
VALUES: Mapping[str, Mapping[str, str]] = {
    "index.encoder": {"lexical": "hashed"},
    "index.retrievers.encoder": {"lexical": "hashed"},
    # of the table of `ragrl evaluate --data`
    "encoder": {"lexical": "hashed"},
}


# Keys that config files did not name at first, with the value that their absence means.
ADDED: Mapping[str, Any] = {
    "optimizer.epochs": 1,
    "optimizer.minibatches": 1,
    "optimizer.warmup_fraction": 0.0,
    "prices.dollars_per_million_prompt_tokens": 0.0,
    "prices.dollars_per_million_completion_tokens": 0.0,
    "prices.dollars_per_search": 0.0,
    "recipe.costs.turn_table": "code",
    "recipe.evaluation_depth": 0,
    "recipe.system.reply_tokens": 256,
    "recipe.train_malformed": True,
    "shapes.decode_rows": 0,
    "shapes.kept_contexts": 0,
    "shapes.slot_tokens": 0,
}


def _moved(*keys: str, **renamed: str) -> dict[str, str]:
    """Keys of `recipe` that became keys of `recipe.system`, some under another name."""
    names = {key: key for key in keys} | renamed
    return {f"recipe.{old}": f"recipe.system.{new}" for old, new in names.items()}


_AGENT = ("kind", "style", "top_k", "max_turns", "max_tokens", "temperature", "top_p")
_MMOA_RAG = {
    "recipe.system.word": "recipe.system.document_word",
    "recipe.system.rewriter_tokens": "recipe.system.rewriter_max_tokens",
    "recipe.system.selector_tokens": "recipe.system.selector_max_tokens",
    "recipe.system.generator_tokens": "recipe.system.generator_max_tokens",
}

# One former key may have different successors: `stages.teacher.hasty` has two.
# The keys of a recipe belong to its system.
RECIPES: Mapping[str, Mapping[str, str]] = {
    "c3po": {
        "recipe.tree.until": "recipe.tree.branching_depth",
        "recipe.tree.free": "recipe.tree.router_samples",
        "recipe.tree.retrieval": "recipe.tree.router_forcing",
        "recipe.tree.multiplicity": "recipe.tree.weigh_duplicates",
        "stages.teacher.greedy_filter": "stages.teacher.p_keep_related",
        "stages.teacher.early_stop": "stages.teacher.p_early_stop",
    },
    "coda": {
        **_moved(
            *("style", "top_k", "max_turns", "max_tokens", "temperature", "top_p"),
            executor_turns="max_executor_turns",
            chat="as_chat_turns",
            refining="refinement",
        ),
        "recipe.formats": "recipe.format_weight",
        "recipe.refine": "recipe.refinement_weight",
        "recipe.together": "recipe.joint_executor_reward",
        "stages.teacher.early_stop": "stages.teacher.p_early_stop",
        "stages.teacher.misread": "stages.teacher.p_misread",
    },
    "mao_arag": {
        "recipe.costs.token": "recipe.costs.token_weight",
        "recipe.costs.retrieval": "recipe.costs.retrieval_weight",
        "recipe.costs.turn": "recipe.costs.turn_weight",
        "recipe.costs.dollars_in": "recipe.costs.dollars_per_1k_prompt_tokens",
        "recipe.costs.dollars_out": "recipe.costs.dollars_per_1k_completion_tokens",
        "recipe.costs.dollars_unit": "recipe.costs.dollars_per_cost_unit",
        "stages.teacher.hasty": "stages.teacher.p_single_search",
        "stages.teacher.wander": "stages.teacher.p_random_plan",
        "stages.teacher.swap": "stages.teacher.p_swap_decomposition",
    },
    "mmoa_rag": {
        **_MMOA_RAG,
        "recipe.penalties.queries": "recipe.penalties.query_rule",
        "recipe.penalties.words": "recipe.penalties.max_answer_words",
        "stages.teacher.word": "stages.teacher.document_word",
        "stages.teacher.lazy": "stages.teacher.p_copy_question",
        "stages.teacher.greedy": "stages.teacher.p_keep_related",
        "stages.teacher.hasty": "stages.teacher.p_keep_first",
    },
    "opera": {
        **_moved(
            *("style", "top_k", "max_rewrites", "temperature", "max_tokens"),
            max_steps="max_plan_steps",
            shared="shared_policy",
        ),
        "recipe.group": "recipe.group_size",
        "recipe.pool": "recipe.expert_pool",
        "recipe.least_steps": "recipe.min_plan_steps",
        "recipe.expert.carried": "recipe.expert.continue_with",
        "stages.teacher.single_step": "stages.teacher.p_single_step",
        "stages.teacher.credulous": "stages.teacher.p_accept_first",
        "stages.teacher.stubborn": "stages.teacher.p_repeat_query",
    },
    "baselines.executor": {
        **_moved(*_AGENT, chat="as_chat_turns"),
        "stages.teacher.early_stop": "stages.teacher.p_early_stop",
        "stages.teacher.misread": "stages.teacher.p_misread",
    },
    "baselines.tree_grpo": {
        "recipe.agent": "recipe.system",
        "recipe.agent.chat": "recipe.system.as_chat_turns",
        "recipe.agent.rollouts": "recipe.rollouts",
        "recipe.tree.share": "recipe.tree.branching_probability",
        "recipe.tree.until": "recipe.tree.branching_depth",
    },
    "baselines.rag_ddr": {**_MMOA_RAG, "recipe.samples": "recipe.group_size"},
}


def aliases_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the former keys of a config, and what each is called now."""
    # Configs of systems outside the package have no aliases of their recipe.
    system = str(config.get("system", "")).removeprefix("jax_ragrl.systems.")
    return {**ALIASES, **RECIPES.get(system, {})}


def current_key(key: str, aliases: Mapping[str, str]) -> str:
    """Returns the current name of a dotted key, which is itself unless it is a former one."""
    parts = key.split(".")
    # From the longest prefix on: `layout.tokens` must not become `packing.tokens`.
    for size in range(len(parts), 0, -1):
        if new := aliases.get(".".join(parts[:size])):
            return ".".join([new, *parts[size:]])
    return key


def current_config(config: Mapping[str, Any], *, warn: bool = False) -> dict[str, Any]:
    """Returns a config in which every former key has its current name.

    Args:
      config: the nested values of a config; `system` selects the names of its recipe.
      warn: whether a `UserWarning` names the former keys. The keys of an existing run cannot be
        changed, so that a warning about them would not help.
    """
    # One dict for the whole config, so that there is a single warning.
    renamed = dict[str, str]()
    result = _rename(config, aliases_of(config), renamed)
    if warn and renamed:
        warn_of(renamed)
    return result


def warn_of(renamed: Mapping[str, str]) -> None:
    """Warns in one line of former config keys: a mapping from former to current ones."""
    pairs = ", ".join(f"{old} is now {new}" for old, new in renamed.items())
    warnings.warn(f"config keys have been renamed, use the new ones: {pairs}", stacklevel=3)


def _rename(
    config: Mapping[str, Any], aliases: Mapping[str, str], renamed: dict[str, str], prefix: str = ""
) -> dict[str, Any]:
    """Renames keys of nested sections; `renamed` collects the former and the current ones."""
    result = dict[str, Any]()
    for key, value in _leaves(config):
        new = current_key(f"{prefix}{key}", aliases)
        if new != f"{prefix}{key}":
            renamed[f"{prefix}{key}"] = new
        # Lists of sections are renamed entry by entry, under the path of the list.
        if isinstance(value, list | tuple):
            value = type(value)(
                _rename(v, aliases, renamed, f"{new}.") if _is_section(v) else v for v in value
            )
        if former := VALUES.get(new, {}).get(value) if isinstance(value, str) else None:
            renamed[f"{new}={value}"] = f"{new}={former}"
            value = former
        # The new path may be in another section, which may not exist yet.
        section = result
        *outer, last = new.removeprefix(prefix).split(".")
        for name in outer:
            section = section.setdefault(name, {})
        section[last] = value
    return result


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping)


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; an empty section is a value."""
    for key, value in config.items():
        # An empty section has no leaves but must not vanish from the config.
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

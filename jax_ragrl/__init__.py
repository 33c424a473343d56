"""Train multi-agent retrieval-augmented generation systems with reinforcement learning, in JAX.

The public interface. It is imported lazily: `import jax_ragrl as rag` alone does not import JAX.

  load_config, train, open_run, evaluate, ask     a config file becomes a run that answers
  TrainedRun, Answer, Result                      what these functions return
  Question, Passage, Hits, Message, Sampling      data
  Retriever, FrozenLLM                            interfaces of your own environment
  System, State, Recipe, Role, ParsedAction       interfaces of your own system
  Generate, Search, CallLLM, Done                 the effects that a state may wait for
  Forest                                          the rollouts of a batch, for your own credit
  UserError                                       an error with its cause and remedy
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from jax_ragrl.version import __version__ as __version__

if TYPE_CHECKING:
    from jax_ragrl.api import Answer as Answer
    from jax_ragrl.api import TrainedRun as TrainedRun
    from jax_ragrl.api import ask as ask
    from jax_ragrl.api import evaluate as evaluate
    from jax_ragrl.api import load_config as load_config
    from jax_ragrl.api import open_run as open_run
    from jax_ragrl.api import train as train
    from jax_ragrl.errors import UserError as UserError
    from jax_ragrl.llm.base import FrozenLLM as FrozenLLM
    from jax_ragrl.retrieval.base import Retriever as Retriever
    from jax_ragrl.rollout.effects import CallLLM as CallLLM
    from jax_ragrl.rollout.effects import Done as Done
    from jax_ragrl.rollout.effects import Generate as Generate
    from jax_ragrl.rollout.effects import Search as Search
    from jax_ragrl.rollout.roles import ParsedAction as ParsedAction
    from jax_ragrl.rollout.roles import Role as Role
    from jax_ragrl.rollout.system import State as State
    from jax_ragrl.rollout.system import System as System
    from jax_ragrl.rollout.tree import Forest as Forest
    from jax_ragrl.run.evaluate import Result as Result
    from jax_ragrl.systems.base import Recipe as Recipe
    from jax_ragrl.types import Hits as Hits
    from jax_ragrl.types import Message as Message
    from jax_ragrl.types import Passage as Passage
    from jax_ragrl.types import Question as Question
    from jax_ragrl.types import Sampling as Sampling

# The module of each public name, and no heavier import than the name needs.
_MODULES = {
    "api": ("Answer", "TrainedRun", "ask", "evaluate", "load_config", "open_run", "train"),
    "errors": ("UserError",),
    "llm.base": ("FrozenLLM",),
    "retrieval.base": ("Retriever",),
    "rollout.effects": ("CallLLM", "Done", "Generate", "Search"),
    "rollout.roles": ("ParsedAction", "Role"),
    "rollout.system": ("State", "System"),
    "rollout.tree": ("Forest",),
    "run.evaluate": ("Result",),
    "systems.base": ("Recipe",),
    "types": ("Hits", "Message", "Passage", "Question", "Sampling"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)

# Silence Transformers' warning that PyTorch is missing; only its tokenizers are used.
logging.getLogger("transformers").addFilter(
    lambda record: not record.getMessage().startswith("PyTorch was not found")
)


def __getattr__(name: str) -> Any:
    """Imports a public name on its first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'jax_ragrl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jax_ragrl.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])

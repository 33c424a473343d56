"""A small run to plan: its system only has roles."""

import types
from typing import Any

from jax_ragrl.credit.assign import over_rollouts
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.run.config import Job, Run
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.systems.base import Recipe
from jax_ragrl.types import Sampling

SHAPES = Shapes(prompt_lengths=(32,), batch_sizes=(16,), max_new_tokens=8, max_prompt_tokens=64)


def small_job(
    width: int = 1, learners: tuple[str, ...] = ("policy",), staleness: int = 0, **changes: Any
) -> Job:
    """A run of a role per policy, in one of which `width` actions are tried."""
    sampling = Sampling(1.0, 0.9, 8)
    roles = {x: Role(x, lambda _: ParsedAction("Act"), sampling, x) for x in learners}
    system: Any = types.SimpleNamespace(style="", top_k=1, roles=roles, steps=None)
    recipe = Recipe(
        *(system, lambda forest: forest.reward_N),
        compare=over_rollouts,
        rollouts=2,
        width=width,
        accepts_judge=True,
    )
    fields: dict[str, Any] = {
        "run": Run(steps=1, staleness=staleness),
        "recipe": recipe,
        "objective": Objective(
            critic="none",
            advantage="group_normalised",
            kl=KL("loss", "k3"),
            importance_weight_cap=2.0 if staleness else 0.0,
        ),
        "optimizer": Optimizer(1e-3),
        "shapes": SHAPES,
        "packing": Layout(row_lengths=(64,), tokens_per_device=64),
        "mesh": (1, 8, 1),
        "compute_dtype": "bfloat16",
        "remat": "full",
    }
    return Job(**(fields | changes))

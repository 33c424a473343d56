"""Every metric of a run with its unit and meaning: one table, for the reference and for a test.

In a name `<role>`, `<strategy>`, `<term>` and `<reason>` stand for names of the system. If roles
have policies of their own, update metrics are logged per policy, such as `plan/kl/mean`.
"""

from __future__ import annotations

from collections.abc import Mapping

METRICS: Mapping[str, Mapping[str, str]] = {
    "Rewards": {
        "reward/mean": "Mean reward of the leaves of a step.",
        "reward/<strategy>": "Mean reward of the leaves that used a strategy (C-3PO's routes).",
        "reward/<term>": "Mean of one term of a leaf's reward, for systems whose reward is a sum.",
        "earned/<role>": "Mean reward that a role's sampled actions earn themselves (penalties, "
        "costs, OPERA's role rewards). Only if a system has such rewards.",
        "eval/accuracy": "The system's metric on the first `run.dev_questions` dev questions, "
        "answered greedily; a judge's verdict if the run has a judge.",
        "strategy/<strategy>": "Share of dev questions that a strategy answered.",
    },
    "Rollouts": {
        "nodes": "Number of nodes that are not leaves, in the forests of a step.",
        "leaves": "Number of leaves, that is of finished rollouts.",
        "failed": "Number of questions whose retriever or language model did not answer. They are "
        "excluded from training.",
        "actions/<role>": "Actions of a role per leaf.",
        "valid_frac/<role>": "Share of a role's sampled actions that parse and whose branch goes "
        "on.",
        "malformed/<reason>": "Number of actions with a parse error, by error.",
        "dead/<reason>": "Number of leaves without an answer, by reason.",
        "zero_variance_frac": "Share of questions with several leaves that all earned the same "
        "reward: a group rule learns nothing from them.",
        "zero_variance_frac/<role>": "The same share over a role's sibling groups, for role "
        "rewards.",
        "logp_right/<role>": "Mean sampler log-probability of actions on rewarded paths, in nats "
        "per token. A falling value means that the policy unlearns them.",
        "credit/<role>": "Mean credit of a role's trained actions.",
        "expert_frac/<role>": "Share of a role's decisions that include an action of an expert "
        "(OPERA).",
        "retrieval/recall": "Mean share of a question's gold passages that any search of its "
        "rollouts returned, for questions that name their gold passages.",
    },
    "Costs": {
        "retrieval_calls": "Number of searches of a step.",
        "passages": "Number of passages that the searches of a step returned.",
        "llm_calls": "Number of calls to the frozen language model in a step, without the judge's.",
        "llm_prompt_tokens": "Prompt tokens of those calls.",
        "llm_completion_tokens": "Completion tokens of those calls.",
    },
    "Updates": {
        "loss/policy": "Weighted policy loss of an optimizer step, mean over the steps of an "
        "update.",
        "loss/value": "Weighted loss of the critic.",
        "loss/dpo": "DPO loss, for runs with a `preference`.",
        "right": "Share of preference pairs whose chosen action gained more probability than the "
        "rejected one, relative to the reference.",
        "pairs": "Number of preference pairs of a step.",
        "entropy": "Mean entropy of the policy on trained tokens, in nats per token, in the "
        "forward pass of each optimizer step.",
        "entropy/old/mean": "Mean entropy before the update, in nats per token.",
        "entropy/old/<role>": "The same over the tokens of a role.",
        "kl/mean": "Mean log-ratio of policy and reference (k1) before the update, in nats per "
        "token.",
        "kl/<role>": "The same over the tokens of a role.",
        "kl/loss": "Mean KL estimate in the loss, in nats per token, if the KL is in the loss.",
        "kl/coefficient": "Coefficient of the KL during the update.",
        "clip_frac": "Share of tokens whose probability ratio is outside the clip range.",
        "advantage/mean": "Mean advantage over tokens.",
        "advantage/<role>": "The same over the tokens of a role.",
        "advantage/std": "Standard deviation of the advantage over tokens.",
        "advantage/std/<role>": "The same over the tokens of a role.",
        "value/mean": "Mean value of the critic over tokens.",
        "value/<role>": "The same over the tokens of a role.",
        "grad_norm": "Global norm of the policy's gradient before clipping.",
        "value/grad_norm": "Global norm of the gradient of a separate critic before clipping.",
        "skipped": "Number of optimizer steps skipped because their gradient was not finite.",
        "left_out": "Number of turns that do not fit into the longest row of `layout.lengths` and "
        "are not trained.",
        "response_length/mean": "Mean tokens per trained action.",
        "response_length/<role>": "The same over the actions of a role.",
        "sampler_gap/max": "Largest absolute difference between the log-probabilities of sampler "
        "and learner, in nats. Large values point to a numerical mismatch.",
    },
    "Time": {
        "time/rollout_s": "Seconds for rollouts and credit.",
        "time/train_s": "Seconds for the update.",
        "time/compile_s": "Seconds of a step that XLA spent compiling.",
        "tokens_per_sec": "Trained context tokens per second of the update.",
        "flops": "Floating-point operations of the update, estimated as six per parameter and "
        "token.",
        "mfu": "Model FLOPs utilization: `flops` over the peak of the devices, if it is known.",
    },
}

"""The learner: from turns with credit to updated parameters.

The call path of one optimizer step, from the training loop to the loss formula:

   1. `training.step.train_step`            one step, from questions to policies
   2. `training.step.learn`                 turns (or pairs: `dpo.prefer_all`)
   3. `policies.update_all`                 each policy on the turns of its roles
   4. `packing.group_turns`                 turns with a common prompt become groups
   5. `update.update`                       one policy: score, targets, optimizer steps
   6. `minibatches.split_minibatches`       random minibatches of groups
   7. `packing.lay_out`                     groups become `Batch(rows, actions)`
   8. `update.score_actions`                log-probabilities and values before the update
   9. `update.compute_targets`              advantages (`targets.compute_advantages`) and weights
  10. `update.optimize`                     one step of the policy, and of its critic
  11. `update.accumulate_and_step`          the gradient, then `gradients.apply`
  12. `accumulation.accumulate`             the gradient of every batch, summed
  13. `gradients.gradient` [jit]            the gradient of one batch, added to the total
  14. `gradients.accumulate_gradient`       in place, layer by layer
  15. `gradients.token_outputs`             one forward pass
  16. `logprobs.token_loss`                 the sum of a loss over scored tokens
  17. `logprobs._per_device`                each device on its own rows
  18. `logprobs._loss_in_chunks`            loss and gradient, one chunk of tokens at a time
  19. `logprobs._loss_forward`              logits of a chunk, never of all tokens at once
  20. `gradients._token_loss`               weighted loss per token, with KL and entropy terms
  21. `Objective.policy_loss`               a function, e.g. `losses.clipped_policy_loss`
"""

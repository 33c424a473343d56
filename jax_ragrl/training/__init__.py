"""The reinforcement-learning loop, its log and its rollout metrics."""

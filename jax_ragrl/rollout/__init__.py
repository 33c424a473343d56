"""Rollouts: effects, roles, the loop that performs effects, and the forest of decisions."""

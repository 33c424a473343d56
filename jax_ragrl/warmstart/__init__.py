"""Supervised training before reinforcement learning, and the data for it."""
